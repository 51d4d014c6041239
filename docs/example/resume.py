"""A loop that may be killed and continues exactly, also on another number of ranks: start it again."""

import pathlib

import torch
import torchvision
from torch.nn.functional import cross_entropy

import shardtrain
from shardtrain import checkpoint, comm
from shardtrain.data.sampler import Share, TrainSampler

torch.distributed.init_process_group("gloo")
data = torchvision.datasets.FakeData(80, (3, 32, 32), transform=torchvision.transforms.ToTensor())
model = shardtrain.shard(torchvision.models.shufflenet_v2_x0_5(num_classes=10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
first, saved = 0, sorted(pathlib.Path("saved").glob("0*"))
if saved:
    first = checkpoint.load(saved[-1], model, optimizer)["step"]

# TrainSampler is a pure function of the seed and the step, so it can begin in the middle of an epoch.
share = Share(batch_size=16, accumulate=1, rank=comm.rank(), world_size=comm.world_size())
sampler = TrainSampler(len(data), share, seed=0, steps=range(first, 10))
batches = [request.indices for request in sampler]
loader = torch.utils.data.DataLoader(data, batch_sampler=batches)
for step, (images, labels) in enumerate(loader, first + 1):
    loss = cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.6f}")
    if step % 4 == 0:
        checkpoint.save(f"saved/{step:08}", model, optimizer, extra={"step": step})
torch.distributed.destroy_process_group()

"""A training loop of one's own: torchrun --nproc-per-node 2 docs/example/own_loop.py"""

import torch
import torch.distributed as dist
import torchvision
from torch.nn.functional import cross_entropy

import shardtrain

dist.init_process_group("gloo")  # "nccl" on GPUs
data = torchvision.datasets.FakeData(80, (3, 32, 32), transform=torchvision.transforms.ToTensor())
sampler = torch.utils.data.DistributedSampler(data, drop_last=True)  # each rank gets its part
loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)
model = shardtrain.shard(torchvision.models.shufflenet_v2_x0_5(num_classes=10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(2):
    sampler.set_epoch(epoch)  # another order in each
    for images, labels in loader:
        loss = cross_entropy(model(images), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # by the norm over all ranks
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"loss {loss.item():.3f}")
dist.destroy_process_group()

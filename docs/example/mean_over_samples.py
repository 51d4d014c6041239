"""Ranks with different numbers of images: gradients are the mean over images, as on one process."""

import copy

import torch
from torch import nn

import shardtrain
from shardtrain import comm

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
plain = copy.deepcopy(model)
shardtrain.shard(model, units=[nn.Linear])
optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, plain)]
for _ in range(3):
    images, labels = torch.randn(4, 8), torch.randint(4, (4,))
    own = slice(0, 3) if comm.rank() == 0 else slice(3, 4)  # three images, and one
    loss = nn.functional.cross_entropy(model(images[own]), labels[own])
    # Gradients are the mean over ranks: an image of rank 0 would weigh a third of rank 1's.
    count = len(labels[own])
    total = comm.all_reduce(torch.tensor(float(count)))
    (loss * count * comm.world_size() / total).backward()
    nn.functional.cross_entropy(plain(images), labels).backward()  # one process with all four
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
for name, whole in shardtrain.full_weights(model):  # one unit at a time
    torch.testing.assert_close(whole, plain.get_parameter(name).detach())
torch.distributed.destroy_process_group()

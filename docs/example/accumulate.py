"""Gradients of several micro-batches before one update: only the last one is reduced."""

import contextlib

import torch
from torch import nn

import shardtrain
from shardtrain import comm

MICRO_BATCHES = 4

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
shardtrain.shard(model, units=[nn.Linear])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + comm.rank())  # other data on each rank
for step in range(3):
    with comm.meter() as meter:
        for micro in range(MICRO_BATCHES):
            last = micro == MICRO_BATCHES - 1
            with contextlib.nullcontext() if last else shardtrain.no_sync(model):
                loss = model(torch.randn(16, 8)).square().mean()
                (loss / MICRO_BATCHES).backward()  # the mean over micro-batches
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}, {meter.calls['reduce_scatter']} reductions")
    assert meter.calls["reduce_scatter"] == 3  # one per unit, whatever the number of micro-batches
torch.distributed.destroy_process_group()

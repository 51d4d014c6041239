"""HSDP: two copies of the model, each sharded over two ranks. Start it on four.

Shards are gathered inside a copy, which may be one host, and gradients are averaged over the copies.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardtrain
from shardtrain import comm

torch.distributed.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
shardtrain.shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
torch.manual_seed(1 + comm.rank())  # other data on each rank
for step in range(3):
    with comm.meter() as meter:
        loss = model(torch.randn(16, 8)).square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}, sent {dict(meter.bytes)} bytes")
    assert meter.calls["all_reduce"]  # over the copies
whole = shardtrain.full_state_dict(model)
values = [torch.empty_like(whole["0.weight"]) for _ in range(4)]
torch.distributed.all_gather(values, whole["0.weight"])
assert all(value.equal(values[0]) for value in values)  # the copies stay equal, bit for bit
torch.distributed.destroy_process_group()

"""Compute in bf16, and keep weights and optimizer state in fp32. BatchNorm computes in fp32, too."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import shardtrain
from shardtrain import Precision, comm

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
precision = Precision(param=torch.bfloat16, reduce=torch.float32)  # gathers move half the bytes
layers = (nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))
model = shardtrain.shard(nn.Sequential(*layers), units=[nn.Linear], precision=precision)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(1 + comm.rank())  # other data on each rank
for step in range(3):
    images, labels = torch.randn(8, 64), torch.randint(10, (8,))
    with comm.meter() as meter:
        loss = cross_entropy(model(images).float(), labels)  # a loss in fp32
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}, sent {dict(meter.bytes)} bytes")
assert all(param.dtype == torch.float32 for param in model.parameters())
assert all(value.dtype != torch.bfloat16 for value in shardtrain.full_state_dict(model).values())
torch.distributed.destroy_process_group()

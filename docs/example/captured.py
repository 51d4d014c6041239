"""Steps as one CUDA graph, on GPUs: torchrun --nproc-per-node 2 docs/example/captured.py"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import shardtrain

on_gpus = torch.cuda.is_available()
torch.distributed.init_process_group("nccl" if on_gpus else "gloo")
device = torch.device("cuda", torch.distributed.get_node_local_rank()) if on_gpus else torch.device("cpu")
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
shardtrain.shard(model, units=[nn.Linear])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, capturable=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


def step(inputs, labels):  # all that a replay repeats; it reads no value on the host
    loss = cross_entropy(model(inputs), labels)
    loss.backward()
    shardtrain.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


if on_gpus:  # the first three calls run `step`, the fourth records it
    step = shardtrain.capture(step, model, optimizer)
for number in range(20):
    size = 8 if number < 19 else 5  # other shapes, such as the last batch, run `step` as it is
    loss = step(torch.randn(size, 8, device=device), torch.randint(4, (size,), device=device))
    schedule.step()  # its rate is a tensor, which replays read
print(f"loss {loss.item():.3f}", getattr(step, "summary", ""))
if on_gpus:  # or NCCL would wait for the graph for ever
    step.release()
torch.distributed.destroy_process_group()

"""The same bits on 1, 2 and 4 ranks: a step of four virtual ranks, computed by as many ranks as there are.

python virtual_ranks.py
torchrun --nproc-per-node 2 virtual_ranks.py
torchrun --nproc-per-node 4 virtual_ranks.py
"""

import hashlib
import os

import torch
from torch import nn
from torch.nn import functional as F

import shardtrain
from shardtrain import comm

VIRTUAL, STEPS, IMAGES = 4, 5, 8  # images per virtual rank

torch.set_num_threads(1)  # other numbers of threads sum in another order
if "WORLD_SIZE" in os.environ:
    torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(288, 10)
model = shardtrain.shard(nn.Sequential(*layers), virtual_ranks=VIRTUAL)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    losses = torch.zeros(VIRTUAL)
    for number in shardtrain.introspect(model).virtual_ranks:  # of this rank
        generator = torch.Generator().manual_seed(step * VIRTUAL + number)  # stands for a data set
        images = torch.randn(IMAGES, 3, 8, 8, generator=generator)
        labels = torch.randint(10, (IMAGES,), generator=generator)
        with shardtrain.virtual_rank(model, number, seed=0, step=step):
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
        losses[number] = loss.detach()
    norm = shardtrain.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    comm.all_reduce(losses)  # each beside zeros, which change no bit
    if comm.rank() == 0:
        print(f"step {step}: loss {losses.mean().item():.9f}, norm {norm.item():.9f}")
weights = shardtrain.full_state_dict(model)
if comm.rank() == 0:
    print(hashlib.sha256(b"".join(value.numpy().tobytes() for value in weights.values())).hexdigest())
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()

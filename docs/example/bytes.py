"""A model of these documents' bytes: torchrun --nproc-per-node 2 docs/example/bytes.py train.epochs=4"""

import math
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from shardtrain.train import Trainer


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.gru = nn.GRU(64, 128, batch_first=True)
        self.head = nn.Linear(128, 256)

    def forward(self, text):  # [batch, length]
        return self.head(self.gru(self.embedding(text))[0])


class Bytes(Trainer):
    def loss(self, outputs, targets):  # [batch, length, 256] and [batch, length]
        total = cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")
        return total, targets.numel()

    def score(self, outputs, targets):
        losses = cross_entropy(outputs.transpose(1, 2), targets, reduction="none")
        return {"bits_per_byte": losses / math.log(2)}

    score.higher_is_better = False


text = b"".join(file.read_bytes() for file in sorted(Path(__file__).parents[1].glob("*.md")))
windows = torch.tensor([*text[: len(text) // 65 * 65]]).view(-1, 65)
data = TensorDataset(windows[:, :-1], windows[:, 1:])  # the target of each byte is the next one
train_set, val_set = torch.utils.data.random_split(data, [0.9, 0.1], torch.Generator().manual_seed(0))
words = "run.name=bytes train.best=bits_per_byte/val optim=adamw optim.lr=0.005 train.epochs=1"
words = [words, "sched.warmup_epochs=0.3", *sys.argv[1:]]
Bytes(Model(), train_set, val_set, " ".join(words)).fit()

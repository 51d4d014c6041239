"""A model and data of one's own, and a hook that logs: torchrun --nproc-per-node 2 docs/example/trainer.py"""

import torch
from torch import nn

from shardtrain.train import Hook, Trainer


class Points(torch.utils.data.Dataset):
    def __init__(self, count):
        self.points = 2 * torch.rand(count, 2) - 1
        self.targets = (self.points.norm(dim=1) < 0.8).long()  # whether each is in a circle

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.points[index], self.targets[index]


class Log(Hook):
    def after_evaluation(self, trainer, step, evaluation):
        if trainer.rank == 0:
            print(f"after step {step}: {evaluation.scores.acc1:.1f} % right")


torch.manual_seed(0)  # so that all ranks have the same data
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))
words = "run.name=circle optim=adamw optim.lr=0.03 train.epochs=2 sched.warmup_epochs=1"
Trainer(model, Points(2880), Points(960), words, hooks=[Log()]).fit()

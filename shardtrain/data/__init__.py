"""Data sets, the order in which ranks see them, and batches on the device."""

from shardtrain.data.batches import Augmented, DataSet, eval_size, sides
from shardtrain.data.feed import Augment, Batch, EvalFeed, Prepare, TrainFeed
from shardtrain.data.sampler import Share, side_in
from shardtrain.data.sets import load

__all__ = [
    "Augment",
    "Augmented",
    "Batch",
    "DataSet",
    "EvalFeed",
    "Prepare",
    "Share",
    "TrainFeed",
    "eval_size",
    "load",
    "side_in",
    "sides",
]

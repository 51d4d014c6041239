"""Data sets, the order in which ranks see them, and batches on the device.

Read in this order: ``sampler`` (which images a rank sees, and when), ``batches`` (what a data set is),
``feed`` (who reads, and batches on the device), ``mixing`` (pairs of images); then the
sets: ``sets`` (by name), ``photos`` over ``folder``, ``tars`` and ``hub``.
"""

from shardtrain.job.data.batches import DataSet
from shardtrain.job.data.feed import Augment, Batch, EvalFeed, Prepare, TrainFeed
from shardtrain.job.data.sampler import Share
from shardtrain.job.data.sets import load

__all__ = [
    "Augment",
    "Batch",
    "DataSet",
    "EvalFeed",
    "Prepare",
    "Share",
    "TrainFeed",
    "load",
]

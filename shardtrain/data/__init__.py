"""Data sets, the order of their images over ranks, and batches on the device.

Read in this order: ``sampler`` (which images a rank has in a step), ``feed`` (what a data set is, loading,
batches on the device); then ``sets``, which opens them by name.
"""

from shardtrain.data.feed import Batch, DataSet, EvalFeed, Mix, Prepare, ToDevice, TrainFeed
from shardtrain.data.sampler import Share
from shardtrain.data.sets import load

__all__ = ["Batch", "DataSet", "EvalFeed", "Mix", "Prepare", "Share", "ToDevice", "TrainFeed", "load"]

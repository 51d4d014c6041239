"""Open data sets, order their images over ranks, and make batches on the device.

Read in this order: ``sampler`` (which images a rank has in a step), ``batches`` (what a data set is),
``feed`` (loading, and batches on the device); then the sets: ``sets`` (by name), and ``photos``.
"""

from shardtrain.job.data.batches import DataSet
from shardtrain.job.data.feed import Augment, Batch, EvalFeed, Mix, Prepare, TrainFeed
from shardtrain.job.data.sampler import Share
from shardtrain.job.data.sets import load

__all__ = ["Augment", "Batch", "DataSet", "EvalFeed", "Mix", "Prepare", "Share", "TrainFeed", "load"]

"""Run one training job, or several with `--multirun`: ``python -m shardtrain.train``."""

import sys

from shardtrain.job.hydra_app import printed

if __name__ == "__main__" and not printed(sys.argv[1:]):
    from shardtrain.train import sweep  # here, since both import torch
    from shardtrain.train.loop import train

    sweep.run(train)

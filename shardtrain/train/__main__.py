"""``python -m shardtrain.train``: one job, or several with `--multirun`."""

import sys

from shardtrain.job.hydra_app import printed

if __name__ == "__main__" and not printed(sys.argv[1:]):
    from shardtrain.train import sweep  # both load torch
    from shardtrain.train.loop import train

    sweep.run(train)

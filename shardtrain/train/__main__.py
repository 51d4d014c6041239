"""``python -m shardtrain.train``: one job, or several with `--multirun`."""

from shardtrain.train import sweep
from shardtrain.train.loop import train

if __name__ == "__main__":
    sweep.run(train)

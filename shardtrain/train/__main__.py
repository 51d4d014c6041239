"""Run one training job, or several with `--multirun`: ``python -m shardtrain.train``."""

import signal
import sys


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the imports below without a traceback
    from shardtrain.job.hydra_app import printed

    if not printed(sys.argv[1:]):
        from shardtrain.train import sweep  # here, since both import torch
        from shardtrain.train.loop import train

        sweep.run(train)


if __name__ == "__main__":
    main()

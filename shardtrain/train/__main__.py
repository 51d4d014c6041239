"""Run one training job, or a sweep of several with `-m`: ``python -m shardtrain.train``."""

import os
import signal
import sys


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the imports below without a traceback
    from shardtrain.config.command import printed

    if printed(sys.argv[1:]):
        return
    from shardtrain.launch import launcher  # here, since these import torch
    from shardtrain.train import sweep
    from shardtrain.train.loop import train

    if not any(flag in sys.argv[1:] for flag in sweep.FLAGS):
        launcher.run(train)
    elif "WORLD_SIZE" in os.environ:
        launcher.start(sweep.refuse_ranks, lambda *_: None)
    else:
        sweep.run(sys.argv[1:])


if __name__ == "__main__":
    main()

"""``python -m shardtrain.train``."""

from shardtrain.train.loop import main

if __name__ == "__main__":
    main()

"""Score a run, also on other images than its own: ``python -m shardtrain.evaluate run=outputs/NAME``."""

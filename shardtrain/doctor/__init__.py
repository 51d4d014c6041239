"""Compare a job with an unsharded one: ``python -m shardtrain.doctor +recipe=resnet``."""

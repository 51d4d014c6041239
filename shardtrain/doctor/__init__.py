"""A job compared with an unsharded one: ``python -m shardtrain.doctor +recipe=resnet``."""

"""The training program: ``python -m shardtrain.train +recipe=resnet``, alone or under torchrun."""

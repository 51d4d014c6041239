"""Train a model: ``python -m shardtrain.train +recipe=resnet``, alone or under torchrun."""

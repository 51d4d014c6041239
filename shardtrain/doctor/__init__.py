"""Check that sharding changes nothing: ``python -m shardtrain.doctor +recipe=resnet``.

`twin.py` takes the same steps with a sharded and an unsharded model; ``__main__`` is the program.
"""

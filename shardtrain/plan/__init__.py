"""What a rank will hold, send and compute, before it does; and what it held, when it has.

    python -m shardtrain.plan +recipe=resnet world_size=64

Read in this order: ``memory`` (which memory lives when), ``simulate`` (the engine without data and without
other ranks), ``report`` (a plan in words and as JSON), ``__main__`` (the program, the largest batch).
"""

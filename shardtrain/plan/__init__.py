"""What a rank will hold, send and compute, before it does; and what it held, when it has.

    python -m shardtrain.plan +recipe=resnet world_size=64

Read in this order: ``live`` (which memory lives when), ``memory`` (one step as numbers, words and a picture),
``step`` (the step that is planned), ``rows`` (how FSDP2 would cut), ``simulate`` (the engine without data and
without other ranks), ``fit`` (the largest batch), ``settings``, ``report`` and ``__main__`` (the program).
"""

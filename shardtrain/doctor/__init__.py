"""Is this installation fit, and does sharding change nothing?

    python -m shardtrain.doctor +recipe=resnet

Read in this order: ``finding`` (a line of the report), ``installation`` (versions, backend, memory, clocks,
disk), ``difference`` (how far two tensors are apart), ``side`` and ``twin`` (the same steps sharded and
unsharded), ``memory`` (plan and measurement), ``__main__`` (the program).
"""

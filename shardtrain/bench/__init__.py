"""Compare shardtrain with FSDP2, FSDP1 and DDP, interleaved in one run, on the user's own machine.

Read in this order: ``contenders`` (what is compared, on which models), ``interleave`` (the measurement and
its statistics), ``settings`` (the command line), ``report`` (what programs collect, and its tables), and the
programs ``steps``, ``memory``, ``collectives`` and ``host``.
"""

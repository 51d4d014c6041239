"""Compare shardtrain with FSDP2, FSDP1 and DDP, interleaved in one run, on the user's own machine.

    torchrun --nproc-per-node 2 -m shardtrain.bench model=resnet50          one case
    torchrun --nproc-per-node 2 -m shardtrain.bench suite=true              the standard cases
    torchrun --nproc-per-node 2 -m shardtrain.bench memory=true             the whole job's peak memory
    torchrun --nproc-per-node 2 -m shardtrain.bench collectives             gather and reduce by themselves
    python -m shardtrain.bench host                                         the host's time, up to 1,024 ranks

Read in this order: ``contenders`` (what is compared, on which models), ``interleave`` (the measurement and
its statistics), ``settings`` (the command line), ``report`` (tables and files), and the programs ``steps``,
``memory``, ``collectives`` and ``host``.
"""

"""The benchmark: shardtrain beside its peers, interleaved in one run, on the user's own machine.

    torchrun --nproc-per-node 2 -m shardtrain.bench model=resnet50          one case
    torchrun --nproc-per-node 2 -m shardtrain.bench suite=true              the standard cases
    torchrun --nproc-per-node 2 -m shardtrain.bench memory=true             the whole job's peak memory
    torchrun --nproc-per-node 2 -m shardtrain.bench collectives             gather and reduce by themselves
    python -m shardtrain.bench host                                         the host's time, up to 1,024 ranks

Read in this order: ``settings`` (the command line), ``cases`` (models and data), ``contenders`` (who is
compared, and how each is set up), ``interleave`` (the measurement), ``statistics`` (from seconds to
ratios), ``judging`` (who is right), ``steps``, ``memory`` over ``processes``, ``collectives`` and ``host``
over ``simulated`` (the four programs), ``report``, ``table`` and ``chart`` (what is shown and written).
"""

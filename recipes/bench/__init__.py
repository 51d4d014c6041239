"""Compare shardtrain with FSDP2, FSDP1 and DDP, interleaved in one run, on the user's own machine.

A program of the checkout: the wheel does not have it. Read in this order: ``contenders`` (what is compared,
on which models), ``interleave`` (the measurement), ``compared`` (its statistics and tables), ``settings``
(the command line), ``report`` (what programs collect), and the programs ``steps``, ``memory``,
``collectives`` and ``host``. ``compare`` is a program of its own.
"""

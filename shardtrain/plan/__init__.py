"""The plan of a step: what a rank will hold, send and compute.

Read in this order: ``memory`` (which memory is in use when), ``transport`` (a rank of a world that does not
exist), ``simulate`` (the engine without data and without other ranks), ``report`` (a plan in words),
``__main__`` (the program).
"""

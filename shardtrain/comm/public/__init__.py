"""torch's collectives for programs of their own; the engine uses none of them.

Read ``collectives.py``, which has them all; ``calls.py`` over ``checks.py`` (what this rank's arguments say),
``agreement.py`` (whether all ranks mean the same call) and ``work.py`` (what ``async_op=True`` returns).
"""

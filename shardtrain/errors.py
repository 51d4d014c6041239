"""The errors that have a name, as one tree.

::

    ShardtrainError         except this catches all that follow
    ├── Diverged            also a RuntimeError: ranks take different paths
    ├── PeerLost            also a RuntimeError: another rank has ended or is silent
    ├── ReplayMismatch      also a RuntimeError: two ranks computed different bits
    ├── SaveFailed          also a RuntimeError: a checkpoint was not written
    ├── Damaged             also a ValueError: a checkpoint cannot be read
    └── UserError           also a ValueError: a mistake in a command or a file of the training program

What is wrong in one call, such as an argument or a model that cannot be sharded, is a plain ValueError.
"""


class ShardtrainError(Exception):
    """The base of all errors of shardtrain that have a name."""


class Diverged(ShardtrainError, RuntimeError):
    """Ranks take different paths through the model."""


class PeerLost(ShardtrainError, RuntimeError):
    """Another rank has ended, or has been silent for too long."""


class ReplayMismatch(ShardtrainError, RuntimeError):
    """Two ranks computed different bits from the same micro-batch. All ranks raise it."""


class SaveFailed(ShardtrainError, RuntimeError):
    """A checkpoint was not saved. All ranks raise it. Earlier checkpoints are untouched."""


class Damaged(ShardtrainError, ValueError):
    """A checkpoint is incomplete or differs from its manifest. Nothing has been loaded."""


class UserError(ShardtrainError, ValueError):
    """A user's mistake: one clear message, exit code 2, no traceback.

    The message says what was found, what was expected, and what to do.
    """

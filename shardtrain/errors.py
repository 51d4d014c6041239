"""Define the errors that have a name, as one tree.

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
    """Be the base of all errors of shardtrain that have a name."""


class Diverged(ShardtrainError, RuntimeError):
    """Report that ranks take different paths through the model."""


class PeerLost(ShardtrainError, RuntimeError):
    """Report that another rank has ended, or has been silent for too long."""


class ReplayMismatch(ShardtrainError, RuntimeError):
    """Report, on every rank, that two ranks computed different bits from the same micro-batch."""


class SaveFailed(ShardtrainError, RuntimeError):
    """Report, on every rank, that a checkpoint was not saved. Earlier ones are untouched."""


class Damaged(ShardtrainError, ValueError):
    """Report that a checkpoint is incomplete or differs from its manifest. Nothing has been loaded."""


class UserError(ShardtrainError, ValueError):
    """Report a user's mistake: one clear message, exit code 2, no traceback.

    The message says what was found, what was expected, and what to do.
    """

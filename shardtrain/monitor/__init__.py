"""Reports of a run: progress, tables, files, TensorBoard.

The loop reports events to a `Monitor`, which passes each on to its writers. Ranks other than 0 have a monitor
without writers, so the loop does not depend on the rank.

Read in this order: ``metrics`` (what is measured between two reports), ``writers`` (where events go),
``monitor`` (all of these together, and tables), ``watch`` (slow ranks, and profiles on request).
"""

from shardtrain.monitor.metrics import StepMetrics
from shardtrain.monitor.monitor import Monitor, open_monitor, score_table, start_table
from shardtrain.monitor.watch import Watch
from shardtrain.monitor.writers import Writer

__all__ = ["Monitor", "StepMetrics", "Watch", "Writer", "open_monitor", "score_table", "start_table"]

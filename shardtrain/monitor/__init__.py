"""What a run tells: progress, tables, TensorBoard, files.

The loop reports to a `Monitor`, which passes everything on to its sinks. Ranks other than 0 have a monitor
without sinks, so the loop never asks which rank it is on.

Read in this order: ``sink`` (where reports go) and ``reporter`` (the monitor); ``phases``, ``stragglers`` and
``window`` (what is measured between two reports); ``tables``, ``verdict`` and ``comparison`` (what is said of
it); ``console``, ``files``, ``board`` and ``glance`` (sinks); ``timeline``, ``norms`` and ``watch`` (what is
looked at between steps); ``opening`` (the monitor of a run, with all of these).
"""

from shardtrain.monitor.opening import open_monitor
from shardtrain.monitor.reporter import Monitor
from shardtrain.monitor.tables import score_table, start_table
from shardtrain.monitor.watch import Watch
from shardtrain.monitor.window import StepMetrics

__all__ = ["Monitor", "StepMetrics", "Watch", "open_monitor", "score_table", "start_table"]

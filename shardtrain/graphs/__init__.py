"""A training step as one CUDA graph: record it, replay it, refuse what no graph holds, compare what changes.

The engine knows nothing of this room, which uses `Engine.require_idle` and `Engine.adopt_changes`, and what a
step leaves on the host: ``driver.asked``, options of units, counts in ``account`` and in the guard's paths,
and what `reset_failed_backward` and `end_steps` undo.
"""

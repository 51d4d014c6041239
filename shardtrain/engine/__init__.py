"""A step of a sharded model. Read unit, segment, schedule, gradient, driver, hooks, with docs/engine.md."""

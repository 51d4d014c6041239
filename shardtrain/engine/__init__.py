"""A step of a sharded model: units, their schedule, and the hooks that drive it."""

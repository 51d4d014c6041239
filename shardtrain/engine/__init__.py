"""Shard models: units, their schedule, and the hooks that drive it."""

"""Whole parameters for users: initial values, state dicts, DCP, what others may know of a sharded model."""

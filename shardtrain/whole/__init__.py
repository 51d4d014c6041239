"""Whole parameters for users: state dicts, and what others may know of a sharded model."""

"""Ranks, devices, signals, and the exit of a job."""

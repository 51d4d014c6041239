"""A training job: `build.py` makes it of a configuration. Its losses, scores, and one step."""

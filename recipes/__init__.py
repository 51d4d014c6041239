"""What recipes are made of: models and augmentations, named by `_target_` in the configs."""

"""What notices or refuses wrong uses of a sharded model: changes, optimizers, copies, wrappers."""

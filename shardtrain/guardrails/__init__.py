"""What notices or refuses wrong uses of a sharded model: changes in place, optimizers, copies, wrappers."""

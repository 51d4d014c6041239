"""What keeps users' code and a sharded model apart: changes between steps, optimizers, copies, wrappers."""

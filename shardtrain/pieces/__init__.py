"""What is right on a rank's shard of a tensor: a class, and the list of functions that it takes."""

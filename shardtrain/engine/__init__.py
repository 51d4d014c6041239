"""The engine behind `shardtrain.shard`: units, their schedule, and the hooks that drive it."""

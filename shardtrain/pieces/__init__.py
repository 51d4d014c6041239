"""What is right on a rank's shard of a tensor: `Piece`, the functions it takes, which elements it has."""

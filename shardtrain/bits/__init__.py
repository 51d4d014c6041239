"""The same bits on any number of ranks, and how a machine that computes wrong is found."""

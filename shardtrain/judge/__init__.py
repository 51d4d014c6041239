"""Judge a sharding wrapper by what users' code does to it."""

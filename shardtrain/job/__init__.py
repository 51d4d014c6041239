"""Build a training job: configuration, ranks, data, model, optimizer, and one step."""

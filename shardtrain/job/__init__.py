"""What a training job is made of: configuration, ranks, data, model, optimizer, and one step."""

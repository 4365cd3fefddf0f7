"""State dicts of sharded models and their optimizers: collected, converted and loaded."""

"""A run in progress: its spec, its state, checkpoints, evaluation and result."""

"""A run on disk: resolved recipe, metrics, model, summary and checkpoint."""

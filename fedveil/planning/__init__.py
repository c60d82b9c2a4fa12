"""Predict a private training run before it starts: signal-to-noise ratio, cost and a verdict."""

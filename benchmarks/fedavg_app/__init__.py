"""Flower's own FedAvg without training: nodes return random arrays. A yardstick."""

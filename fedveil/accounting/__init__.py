"""The mathematics of privacy loss: norms, events, distributions, ε and δ. It never sees data."""

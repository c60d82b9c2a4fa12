"""The privacy budget of each data set: a hash chain of entries, budgets and charges."""

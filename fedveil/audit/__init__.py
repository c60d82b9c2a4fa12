"""Empirical lower bounds on ε beside the proven ones, and the test of others' aggregators."""

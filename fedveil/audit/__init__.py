"""Empirical lower bounds on ε, and tests of other frameworks' aggregators."""

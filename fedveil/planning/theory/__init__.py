"""Theorems of the papers as functions of named constants: recommended rates and proven bounds."""

"""Secure aggregation: the server learns the sum of messages and nothing else (docs/secagg.md)."""

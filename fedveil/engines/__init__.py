"""Ways to compute a group of clients' updates; all of them give the same numbers."""

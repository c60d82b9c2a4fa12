"""One script for each contestant: it plays the rounds of a workload and prints one JSON line."""

"""Train and compare algorithms, settings and seeds at the same budget on the same data."""

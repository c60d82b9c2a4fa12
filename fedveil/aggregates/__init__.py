"""Statistics of private columns with noise: sums, histograms, quantiles, frequent values."""

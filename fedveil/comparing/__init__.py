"""Several recipes, settings and seeds at one budget on the same data: played, tested, told."""

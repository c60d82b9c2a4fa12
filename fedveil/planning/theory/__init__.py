"""The papers' theorems as functions of named constants: rates they recommend, bounds they prove."""

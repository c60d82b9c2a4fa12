"""Published tables and figures as files: compiled to ordinary runs, measured and judged."""

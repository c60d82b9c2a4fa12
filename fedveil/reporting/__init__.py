"""The report: runs and comparisons as one self-contained HTML page.

`load` reads and refuses, `curves`, `people` and `grids` draw, `words` and `picture` say what was
run, `page` puts them together.
"""

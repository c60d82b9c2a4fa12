"""The report: runs and comparisons as one self-contained HTML page.

`load` reads and validates, `curves`, `people` and `grids` draw, `words` and `picture` describe the
runs, and `page` assembles the page.
"""

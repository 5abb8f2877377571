"""One file for each paper, or a folder where there is more: its layers, its conversion, its objective, its row.

Imports `core`, `surgery` and `training`, and no method imports another. A new method is a new file here; the `ROWS`
at its end (see `registry`) are what studies and the command line know of it.
"""

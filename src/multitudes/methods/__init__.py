"""One file for each paper, or a folder where there is more: its layers, its conversion, its objective, its row.

Imports `core`, `surgery` and `training`, and no method imports another. A new method is a new file here; the row at its
end is what studies and the command line know of it.
"""

"""Methods: one file per paper, or a folder for larger ones, with layers, conversion, objective and `ROWS`.

Imports `ensemble`, `surgery` and `training`. Only combinations import other methods: `tabm` is a `batch_ensemble`, and
`smooth_dropout` is `mc_dropout` of a smoothed network. Studies and the command line read the `ROWS` at the end of each
file (see `registry.py`).
"""

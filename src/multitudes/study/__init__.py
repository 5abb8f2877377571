"""Studies: train many methods and find the one worth its price on the given data.

Imports every package except `report` and `cli`. From top to bottom: `execution` runs jobs, `worker` is one job,
`planning` turns a `spec` into jobs, `store` is the run directory, `leaderboard` reads its results. To add a key to
`study.toml`, edit `sections.py`; it becomes a command-line option too.
"""

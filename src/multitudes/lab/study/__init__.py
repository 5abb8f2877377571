"""Studies: train many methods and find the one worth its price on the given data.

Imports the library and `lab.data`. `spec/` reads and plans a study, `run/` executes its jobs, `results/` compares them.
To add a key to `study.toml`, edit `spec/sections.py`; it becomes a command-line option too.
"""

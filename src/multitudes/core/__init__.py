"""The base of the library: calling networks, members, draws, tasks and predictions.

Imports nothing from the other packages. New tasks go into `tasks/`, faster layers for packed members into
`packing/rules.py`.
"""

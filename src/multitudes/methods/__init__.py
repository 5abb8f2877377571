"""One file a paper, or one folder: its layers, its conversion, its objective, and its rows for studies, in that order.

A method imports `core`, `surgery` and `training`, and no other method. A newcomer adds a file here, with its `ROWS`
(`registry.py` says what is in one), and its name to `multitudes/__init__.py`; studies and the command line find it.
"""

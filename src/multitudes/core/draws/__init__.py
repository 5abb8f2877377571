"""Many draws of a network whose layers draw: the layers' protocol, the engine, memory, adaptive numbers.

`stochastic.py` is what a layer of your own subclasses. Imports `core` alone.
"""

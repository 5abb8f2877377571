"""Draws of networks with stochastic layers: the layers' protocol, the engine, memory, adaptive counts.

Subclass the layer in `stochastic.py` for your own. Imports only `core`.
"""

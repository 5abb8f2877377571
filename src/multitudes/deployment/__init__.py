"""Deployment: `deploy` makes a trained network as fast as possible on its machine.

Imports `core`, `metrics`, `evaluation`, `storage`. `conversion.py` decides; `preparing.py` reduces the work; an engine
(`engines.py`) runs the network. Each optimisation has its own file: folded norms, fused kernels, captured graphs, ONNX
Runtime. A new engine or fusion only changes these files, and is verified against the network.
"""

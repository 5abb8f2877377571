"""Deployment: `deploy` makes a trained network as fast as possible on its machine.

Imports `ensemble`, `metrics`, `evaluation` and `files`. `deploy.py` chooses an engine of `engines.py`, and
`preparation.py` reduces the network's computation. Each optimization has its own file: folded norms, fused
convolutions, CUDA graphs, ONNX Runtime. Each is verified against the network.
"""

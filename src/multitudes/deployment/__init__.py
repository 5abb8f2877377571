"""Networks at work: `deploy` makes a trained network answer as fast as its machine can.

Imports `core`, `metrics`, `evaluation`, `storage`. `conversion.py` decides; `preparing.py` leaves less to compute; an
engine (`engines.py`) runs. What it does to a network is a file of its own: norms folded, kernels fused, graphs
captured, ONNX Runtime. Whoever adds an engine or a fusion changes these alone, and proves it against the network.
"""

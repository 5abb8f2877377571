"""`deploy`: a fast copy of a trained network, verified against the network.

Imports `ensemble`, `metrics`, `evaluation` and `files`. `preparation.py` reduces the computation, and `deploy.py`
chooses one of the engines: torch (`engines.py`), ONNX Runtime (`onnx_engine.py`), or CUDA graphs (`cuda_graphs.py`).
"""

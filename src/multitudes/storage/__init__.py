"""Networks in files: `save` and `load`, `freeze` draws into plain networks, `to_onnx`.

Imports `core`, `surgery` and `evaluation`, and knows no method: a layer says itself how it is folded, and with whom it
shares its tensors. Nothing that is read back runs code.
"""

"""Networks in files: `save` and `load`, `freeze` draws into plain networks, `to_onnx`.

Imports `ensemble`, `surgery` and `evaluation`, and no methods: each layer defines how it is folded and with which
modules it shares tensors. Loading never runs code.
"""

"""Networks in files: `save` and `load`, `freeze`, `to_onnx`.

This package imports no methods: each layer declares how it is folded and with which module it shares tensors. Loading
never runs code.
"""

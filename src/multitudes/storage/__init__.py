"""Storage: save and load, freeze draws for good, export to ONNX.

It imports everything up to `evaluation`, and knows no method: what it has to know of a layer the layer carries itself
(`fold`, `shares`, `wraps`, `unsaved`; divergences are declared by a decorator). A newcomer changes it for a new format.
"""

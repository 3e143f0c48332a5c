"""Quantized weights: published formats, each read to floating point exactly, and rounding done at load.

`schemes` says what a checkpoint holds and imports no torch; `models/config/quantization_config.py` makes it from
config.json. The other modules turn stored tensors into values, one family of formats each; `dequantize` chooses.
"""

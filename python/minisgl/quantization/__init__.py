"""Quantized weights: published formats, each read to floating point exactly, and rounding done at load.

`schemes` describes formats and imports no torch; `models/config/quantization_config.py` makes a description from
config.json. `scaled`, `packed` and `mxfp4` read one family of formats each, as a `matrix` of which any part can be
read; `dequantize` chooses among them. `levels` is a matrix that stays quantized, `gpu_layout` and `expert_layout` its
layout for the kernels of csrc/. `rounding` rounds weights at load, `random_levels` makes dummy weights, and `kv_scales`
applies a checkpoint's scales of K and V.
"""

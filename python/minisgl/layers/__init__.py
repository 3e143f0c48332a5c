"""Tensor-parallel layers. Each is built for one rank of a TP group and says which parts of a checkpoint it keeps.

`layer_config` describes a layer, and imports no torch. A layer's first half is `attention`, `latent_attention` or
`delta_net`, its second half `mlp`. They are made of `linear`, `norm` and `rotary`. `embedding` has the vocabulary's
matrices, `per_layer_inputs` those that some models have for each layer, and `weight_slice` names a part of a
checkpoint's tensor.
"""

"""Mixture of experts on a GPU.

`cuda_routing` chooses the experts of each token. `cuda_moe` sorts tokens by their experts and multiplies: `dense_moe`
has the products of 16-bit experts, `quantized_moe` those of quantized ones.
"""

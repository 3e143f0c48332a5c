"""Products of a step's rows with one weight on a GPU: each module chooses the tiling of a kind, and launches it.

- Dense weights: `skinny_gemm` for a few rows, `small_batch_gemm` for some tens, cuBLAS for more.
- Quantized weights: `cuda_weights` has them. `quantized_gemm` multiplies 16-bit rows, with the tilings of
  `quantized_tiling` and `gemv_tiling`; `fp8_gemm` rounds the rows to FP8 (`fp8_rows`, `fp8_schedule`).
"""

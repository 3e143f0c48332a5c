"""Fused operations: their interface, three implementations of it, and the parts of these in folders.

`base` declares `Ops`, which layers call, and `Weight`, a loaded matrix with its products. `torch_ops` is the reference,
`cpu_ops` and `cuda_ops` are faster; `availability` chooses among them.

- CPU: `cpu/` has layouts of weights, and compiles csrc/int4_cpu.cpp.
- GPU: `launch/` compiles the CUDA kernels of csrc/, and makes typed launchers from their declarations. Each module
  below chooses the tiling of one kind of work, and launches it.
- Products with one weight, dense or quantized: `gemm/`. Mixture of experts: `experts/`.
- Latent attention: `cuda_latent`. Recurrent layers, in torch too: `delta_net/`.
- Sums and gathers over several GPUs: `collectives/`.
"""

"""Fused operations: the interface, the torch reference, and the CUDA kernels of csrc/.

`base` declares `Ops`, which layers call, and `Weight`, a loaded matrix with its products. `torch_ops` is the reference;
`availability` chooses among it, `cpu_ops` and `cuda_ops`.

- CPU: `cpu_weights` has the layouts of weights, `cpu_int4` the one of csrc/int4_cpu.cpp, which `cpu_compile` compiles.
- GPU: `launch/` compiles csrc/ and makes typed launchers from the kernels' declarations. Each of the modules below
  chooses the tiling of one kind of work, and launches it.
- Products with one weight, dense or quantized: `gemm/`.
- Mixture of experts: `experts/`.
- Latent attention: `cuda_latent`. Recurrent layers: `delta_net/`.
- Several GPUs: `all_reduce`.
"""

"""Model families, one file each, their configs, the decoder and its weights.

- A family (`llama`, which has a table of them, `gemma3`, `gemma4`, `qwen3_next`, `gpt_oss`, `glm4_moe`, `deepseek`)
  reads its config.json into the `ModelConfig` of `config/`.
- `base` is the model as the engine knows it. `decoder` and `decoder_layer` have the equations of every family, with
  `gemma4_layer` for one of them; `pooling_model` makes vectors, and `generic/` runs any other decoder of transformers.
- `hub` finds the folder, `checkpoint` reads its tensors, and `loading` fills the model: `linear_loader` and
  `expert_loader` in the form that `weight_forms` decides. `online_quantization` rounds what is left.

Importing this package, the families, `config` or `hub` loads no torch.
"""

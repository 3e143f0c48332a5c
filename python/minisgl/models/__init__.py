"""Models: families and their configs, the decoder, and its weights.

- `load_config` reads a folder's config.json by the family of its architecture: `families/` has one file each, which
  makes the `ModelConfig` of `config/`.
- `base` is the model as the engine knows it. `decoder` and `decoder_layer` have the equations of every family, with
  `gemma4_layer` for one of them; `pooling_model` makes vectors, and `generic/` runs any other decoder of transformers.
- `hub` finds the folder, and `weights/` fills the model from its files.

Importing this package, `load_config`, `families/`, `config/` or `hub` loads no torch.
"""

"""A model's configuration: its type, and how a Hugging Face folder is read. No torch: the supervisor reads it.

`load_config` reads a folder into a `model_config`; the table of families is there. `config_reader` looks up the keys of
a config.json, `common_fields` reads what families share, `quantization_config` the format of the weights.
`generation_config`, `read_pooling` and `checkpoint_metadata` read the other files.
"""

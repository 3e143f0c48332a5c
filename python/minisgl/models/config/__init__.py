"""A model's configuration: its type, and how the files of a Hugging Face folder are read. No torch.

`model_config` is the configuration, which a family makes. For that, `config_reader` looks up the keys of a config.json,
and `common_fields` reads what families share. `quantization_config` reads the format of the weights;
`generation_config`, `read_pooling` and `checkpoint_metadata` read the other files.
"""

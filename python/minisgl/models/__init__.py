"""Model families, one file each, their configs, the decoder and its weights.

Importing this package, the families, `config` or `hub` loads no torch.
"""

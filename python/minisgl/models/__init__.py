"""Model families: config, registry (no torch), one file per family, building and loading.

Importing this package or `config`, `registry` and `hub` loads no torch.
"""

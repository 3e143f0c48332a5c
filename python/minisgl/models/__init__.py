"""Model families: config (pure), registry (pure), one file per family, building and loading.

Importing this package or `config`, `registry` and `hub` loads no torch.
"""

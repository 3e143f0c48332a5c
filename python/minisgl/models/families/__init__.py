"""Model families, one file each: how a config.json becomes a `ModelConfig`. No torch.

`llama` has a table of families that differ from Llama in a few settings. The equations are those of `models/decoder.py`
for all of them, and `models/load_config.py` has the table that chooses a family by architecture.
"""

"""Streaming decoders: ids of tokens to text, as they come.

`base` has their interface and tables. Almost all tokenizers are of two kinds: `byte_level` maps every token to bytes,
and `tokenwise` every token to text. `redecoding` decodes all the rest with `tokenizers`. `decoder_choice.py` chooses.
"""

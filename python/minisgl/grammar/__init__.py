"""Structured output: grammars that an answer must follow, on llguidance.

A `core.Grammar` is checked where its request is (`validate`, the tokenizer worker) and followed where its tokens are
chosen (`matcher`, the scheduler of rank 0). `text` puts every kind into llguidance's notation for both. No torch.
"""

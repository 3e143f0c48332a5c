"""`minisgl verify MODEL`: does this engine compute what Hugging Face transformers computes?

`prompt_texts` makes the prompts, `oracle` answers them with transformers and keeps its logits in a file, `ours` answers
them with the Engine and compares while it runs, `compare` (pure) says what is rounding and what is not, `findings`
prints.
"""

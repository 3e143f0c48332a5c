"""`minisgl verify MODEL`: does this engine compute what Hugging Face transformers computes?

`prompts` makes the questions, `oracle` answers them with transformers and keeps its logits in a file, `ours` answers
them with the Engine and compares while it runs, `compare` and `limits` (pure) say what is rounding and what is not,
`report` prints.
"""

from minisgl.verify.main import main

__all__ = ["main"]

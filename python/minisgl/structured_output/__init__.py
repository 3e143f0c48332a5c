"""Structured output: grammars that an answer must follow, on llguidance.

A `core.Grammar` passes through these modules in order:

- `response_format` (API process): what clients ask for becomes a Grammar; `tool_grammar` demands tool calls in the
  model's own form, as a `grammar_template`.
- `validator` (tokenizer worker): puts the model's reasoning before the answer and has the grammar tried, in the order
  of `compile_queue`, by `trial_process`. `translate` turns every kind into llguidance's notation, by way of `ebnf` and
  `json_schema`.
- `matcher` (scheduler of rank 0): follows it, token by token, and fills the grammar bitmask. The scheduler knows
  matchers by their `protocol` only.

The modules of the API process import no llguidance, and none imports torch.
"""

"""Structured output: grammars that an answer must follow, with llguidance.

A `sampling_params.Grammar` passes through these modules in order:

- `response_format` (API process) makes a Grammar of a request's fields; `tool_grammar` makes one that demands tool
  calls in the model's own form, as a `grammar_template`.
- `validator` (tokenizer worker) puts the model's reasoning before the answer, and has the grammar tried by
  `trial_process`, through `trials`, in the order of `compile_queue`. `translate` writes every kind in llguidance's
  notation, with `ebnf`, `ebnf_reader` and `json_schema`.
- `matcher` (scheduler of rank 0) follows the grammar, token by token, and fills the grammar bitmask. `automata` has the
  compiled grammars and bounds their memory, which `heap` measures. The scheduler knows matchers only by their
  `protocol`.

The modules of the API process import no llguidance, and none imports torch.
"""

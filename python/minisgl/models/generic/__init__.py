"""Any other decoder of transformers: its own modules, with attention over the paged KV pool in the place of theirs.

- Reading a config: `read_config` has `model_probe` make the model without weights and run it once, which records what
  attends (`attention_interface`), what rotates (`rotation`) and what reads the same input (`linears`).
- Loading: `load` has transformers read the weights. `replace` puts our `blocks` and `linears` in the place of modules
  that compute the same, as `numeric_probe` finds out. `sharding` divides them among ranks, after `meta_run` has tried
  that without weights.
- Running a step: the engine calls `causal_lm`, and `step` gives its modules the context of the step.
"""

"""The engine: executes plans on a device. Model, KV pool, slot state, attention, sampler and CUDA graphs meet here.

`engine` is what the scheduler calls. It runs on a `queue` of the `device`: a CUDA stream, or a thread of the CPU, for
which `cpu_threads` says how many threads a step may use. A step is two launches:

- `forward` runs the model on the tensors that `step_inputs` makes of the plan; `pooling` does so for models that make
  vectors. `state` has the rows of all slots, `logits_tables` what they hold of biases, penalties and forbidden ids.
- `sampling/` applies these to the logits and draws the tokens.

`cuda_graphs/` replays decodes and small prefills in one launch, and tries at the start which graphs are right and pay.
The start goes in this order: `parts` loads kernels and weights, the graphs are tried, `step_trial` and `memory` size
the KV pool, and `cost_measurement` finds how long steps take.
"""

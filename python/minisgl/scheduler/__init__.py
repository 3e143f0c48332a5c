"""The scheduler: decides each step's batch, owns requests, slots and pages. Only `process` knows torch.

`process` serves a rank on its sockets, `assembly` puts the parts of rank 0 together, `loop` runs the steps, and `ranks`
sends plans to the other ranks. `scheduler` decides, with a part for each question:

- who comes and goes: `request` draws the states, `lifecycle` makes the transitions, `waiting_queue` has the order.
- how many tokens each row gets: `batch_policy`, within the bounds of `step_limits`.
- where the rows are: `table` has a row for each slot, `request_pages` its pages, `window_rows` those of layers with a
  window, and `state_snapshots` says when the state of a recurrent layer is saved.
- what a step returned: `step_results` applies it, `token_scores` packs log-probabilities.
- when the device had too little memory: `step_recovery` undoes the plans.

`step_trace` records steps for the glass box, `kv_publisher` tells routers what is cached.
"""

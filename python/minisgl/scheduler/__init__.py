"""The scheduler: decides each step's batch, owns requests, slots and pages. Only `process` knows torch.

`process` serves a rank on its sockets, `assembly` puts the parts of rank 0 together (`cache_pools` those of its KV
cache), `loop` runs the steps, and `ranks` sends plans to the other ranks. `scheduler` makes the decisions, from two
folders:

- `requests/`: who comes and goes, in what order, and which slot, pages and snapshots each request holds.
- `steps/`: how many tokens each row gets in a step, what becomes of the step's result, and what is undone if the device
  had too little memory for it.

`kv_publisher` tells routers what is cached.
"""

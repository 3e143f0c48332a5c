"""Requests of the scheduler, and what each of them holds.

- Who comes and goes: `request` draws the states, `waiting_queue` has the order, and `lifecycle` makes the transitions.
- Where the rows are: `table` has a row for each slot, `request_pages` its pages, `window_rows` those of layers with a
  window, and `state_snapshots` says when the state of a recurrent layer is saved.
"""

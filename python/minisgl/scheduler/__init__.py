"""The scheduler: decides each step's batch, owns requests, slots and pages. Only `process` knows torch."""

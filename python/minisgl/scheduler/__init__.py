"""The scheduler: decides each step's batch, owns requests, slots and pages. All of it but `process` is pure."""

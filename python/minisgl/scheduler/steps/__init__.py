"""Parts of a step's way from its plan to its result, which `scheduler` puts together.

- How many tokens each row gets: `batch_policy`, within the bounds of `limits`. Both are pure.
- What a step returned: `results` applies it, `token_scores` packs log-probabilities.
- When the device had too little memory: `recovery` undoes the plans, and tightens the limits.
- `trace` records steps for the glass box.
"""

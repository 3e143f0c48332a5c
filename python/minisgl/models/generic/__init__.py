"""Any other decoder of transformers: its own modules, with attention over the paged KV pool in the place of theirs."""

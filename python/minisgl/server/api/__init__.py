"""The API server: HTTP on one side, the wire messages of `minisgl.message` on the other.

`api_process` runs it, `app` puts it together. A request comes through `http/` to one of `routes/`. `bodies/` reads it,
`requests/` holds it while it is answered, `answers/` writes the answer. `anthropic/` and `responses/` translate the
requests of other APIs into chat completions, and write answers in the form of their API; `pooling/` has embeddings,
scores and classes. `metrics` counts, `prometheus` writes the counts as text, `tracing` records spans, and `openapi`
describes all routes. Nothing here imports torch or transformers.
"""

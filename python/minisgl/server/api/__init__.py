"""The API server: HTTP on one side, the wire messages of `minisgl.message` on the other.

`process` runs it; `app` puts it together: `boundary` (request ids, keys) around `routes`, a module per topic. `schema`
and `body` say what clients may send, `responses` what they get, `errors` what they are told when something is wrong.
`chat`, `completions`, `generate` and `sglang` translate between the two; `client` owns every open request; `answer`
owns the HTTP side of one; `heartbeat`, `metrics` and `prometheus` say how the server is. Nothing here imports torch or
transformers.
"""

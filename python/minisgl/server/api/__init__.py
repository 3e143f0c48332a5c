"""The API server: HTTP on one side, the wire messages of `minisgl.message` on the other.

`process` runs it; `app` has the routes; `schema` and `body` say what clients may send, `responses` what they get;
`chat`, `completions` and `generate` translate between the two; `client` owns every open request; `answer` owns the
HTTP side of one. Nothing here imports torch or transformers.
"""

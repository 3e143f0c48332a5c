"""The API server: HTTP on one side, the wire messages of `minisgl.message` on the other.

`api_process` runs it, `app` puts it together. A request comes through `http/` to one of `routes/`. It is read by
`bodies/`, under way in `requests/` and written by `answers/`; `anthropic/` and `responses/` put the requests of other
APIs into the words of chat completions, and write the answers in theirs. `metrics` counts, and `openapi` describes it
all. Nothing here imports torch or transformers.
"""

"""The API server: HTTP on one side, the wire messages of `minisgl.message` on the other.

`process` runs it, `app` puts it together. A request comes through `http/` to one of `routes/`, is read by `bodies/`, is
under way in `requests/` and written by `answers/`; `heartbeat` and `metrics` say how the server is. Nothing here
imports torch or transformers.
"""

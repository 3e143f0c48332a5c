"""The API server: HTTP on one side, the wire messages of `minisgl.message` on the other.

`process` runs it, `app` puts it together, `service` is what every route of `routes/` knows. A request comes through
`http/`, is read by `bodies/`, is under way in `requests/` and written by `answers/`; `status/` says how the server is.
Nothing here imports torch or transformers.
"""

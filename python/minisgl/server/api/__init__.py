"""The API server: HTTP on one side, the wire messages of `minisgl.message` on the other.

- The process: `process` runs it, `app` puts it together, `service` is what every route of `routes/` knows.
- A connection: `connection` (HTTP, and what clients may send when), `boundary` (request ids, keys), `body` (the JSON),
  `errors` (what clients are told), `stream_body` (the way of a stream's events).
- What is asked: `schema` (all bodies and their fields), `structured`, `prompts`, `messages`, `tools`, `functions`,
  `conversation`.
- What is answered: `responses` (all forms), `logprobs`, and the translators of the routes that generate: `chat` with
  `chat_writer`, `completions`, `generate`, `sglang`, with `choice_text`.
- A request from its submission to its last byte: `client` owns all that are open, `open_request` is one, `delta`
  what came for one choice, `answer` its HTTP side; `questions` are those that generate nothing.
- How the server is: `heartbeat`, `metrics`, `prometheus`.

Nothing here imports torch or transformers.
"""

"""Answers of generating routes: each route has a function from its body to a job, and a writer of the job's output.

`answer` is the HTTP side, from submission to the last byte. `chat` makes the job of a chat and `chat_writer` writes its
answer, whose text a `parsed_choice` divides; `completions` and `sglang` do both for /v1/completions and /generate.
Response objects are declared beside their writers, except log-probabilities (`logprob_forms`). `large_json` and
`writer_thread` write large answers without holding up the event loop.
"""

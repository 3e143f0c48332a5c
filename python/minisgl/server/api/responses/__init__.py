"""OpenAI's Responses API: POST /v1/responses, and what was answered, kept on request.

A `body` becomes a conversation of chat completions (`items`, `job`), whose answer the `writer` renders as a
response with the items of `output`; `store` keeps responses.
"""

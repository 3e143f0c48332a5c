"""OpenAI's Responses API: POST /v1/responses, and the responses that are stored on request.

`job` translates a `body`, with its `items` and `tools`, into a chat completion, whose answer `writer` writes as a
response with the items of `output`. `store` keeps responses, and `history` looks them up for one owner.
"""

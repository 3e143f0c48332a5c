"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens, and its form of the list of `models`.

`chat_form` translates a body of `bodies`, and `tools` its tools, into a chat completion, whose job runs. `writer`
writes its answer as Anthropic's objects.

Specification: https://platform.claude.com/docs/en/api/messages
"""

"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens.

`chat_form` puts a body of `bodies` into the words of /v1/chat/completions. The job of that runs, and `writer` writes
its answer as the objects that Anthropic's clients read.

Specification: https://platform.claude.com/docs/en/api/messages
"""

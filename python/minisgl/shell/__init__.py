"""The interactive terminal client: `python -m minisgl --shell`, or `python -m minisgl.shell` for any server.

It speaks OpenAI's API and needs nothing of the engine. `session` holds the conversation and the commands, `chat_client`
the HTTP, `terminal` what people see (with the extra `shell`), `shell_process` what the server calls for `--shell`.
"""

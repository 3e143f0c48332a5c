"""The interactive terminal client: `python -m minisgl --shell`, or `python -m minisgl.shell` against any server.

It speaks OpenAI's API and needs nothing of the engine. `session` holds the loop and the commands, `client` the HTTP,
`terminal` and `plain` are how words come in and go out, `launch` is what the supervisor calls for `--shell`.
"""

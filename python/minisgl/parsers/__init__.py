"""Takes apart what a model wrote: its reasoning, its content, its tool calls.

Every parser is a pure state machine: pieces of text in, events out. However the text is cut into pieces, the events
together are the same. Nothing is lost: what turns out not to be a tool call is content, and a parser holds back only
what may yet be a marker or the head of a call. `parser_choice` chooses the parsers from a model's chat template and
joins them into one. Grammars that make a model call a tool in its own form are in `structured_output.tool_grammar`.
docs/extending/parser.md says how to add one.
"""

"""Splits a model's output into reasoning, content and tool calls.

Every parser is a pure state machine that takes pieces of text and returns events. However the text is cut into pieces,
the events together are the same. No text is lost: text that turns out not to be a tool call is content, and a parser
holds back only text that may become a marker or the head of a call.

`streaming` has the events and the base class of all parsers, `reasoning` the parser of reasoning, and `tool_calls` the
base class of those of calls: `json_forms` (which read JSON by `json_call`), `qwen_coder` (which reads values by
`plain_values`) and `pythonic`. `harmony` parses all of gpt-oss's output. `parser_choice` chooses the parsers from a
model's chat template and combines them. `structured_output.tool_grammar` has the grammars that make a model call tools
in its own form. docs/extending/parser.md says how to add a parser.
"""

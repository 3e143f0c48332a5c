"""Text to token ids and back: the tokenizer workers, the detokenizer worker, and their pure parts.

`text` encodes prompts (`chat_template` renders conversations first); `incremental` turns output ids into text as they
come; `stop` finds stop strings in that text; `detokenizer` holds these states for all sequences. `worker` and
`detokenizer_worker` put them behind sockets. Nothing here imports torch, nor transformers for a model that has a
tokenizer.json.
"""

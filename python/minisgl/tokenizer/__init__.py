"""Text to token ids and back: the tokenizer workers, the detokenizer worker, and their pure parts.

`text` encodes prompts (`chat_template` renders conversations first), and `admission` makes of a request what the
scheduler is to run. `incremental` turns output ids into text as they come, and `detokenizer` holds that state for all
sequences and finds stop strings. `tokenizer_worker` and `detokenizer_worker` put them behind sockets. `files` and
`folder` read a model's folder. Nothing here imports torch, nor transformers for a model that has a tokenizer.json.
"""

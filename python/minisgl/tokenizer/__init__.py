"""Text to token ids and back: the tokenizer workers, the detokenizer worker, and the functions that they run.

`text` encodes prompts, conversations with the model's `chat_template` and pairs for rerankers with `pairs`.
`conversation` brings OpenAI's messages into the form of chat templates, `harmony_messages` into that of gpt-oss, and a
template runs in the `template_sandbox`. `admission` turns a request into what the scheduler runs. `decoders/` turns
output ids into text as they come (`decoder_choice` says by which decoder), and `detokenizer` holds that state for all
sequences and finds stop strings. `tokenizer_worker`, where clients take `turns`, and `detokenizer_worker` serve them on
sockets. `load_tokenizer` and `tokenizer_config` read a model's folder. Nothing here imports torch, nor transformers for
a model that has a tokenizer.json.
"""

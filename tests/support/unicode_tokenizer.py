"""A large byte-level vocabulary made on the spot: its tokens are words, characters of many scripts, and parts of them.

Answers of random weights over it are full of cut characters, emoji and CJK, as with a real vocabulary, and nothing has
to be downloaded.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

WORDS = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
ENGLISH = "the of and to in is that it was for on are with as his they be at one have this from again over word quick"
SCRIPTS = [
    *(range(0xA1, 0x250), range(0x300, 0x370), range(0x370, 0x500)),  # Latin, combining marks, Greek and Cyrillic
    *(range(0x3040, 0x3100), range(0x4E00, 0xA000), range(0xAC00, 0xD7A4)),  # kana, Chinese characters, Hangul
    *(range(0x1F1E6, 0x1F200), range(0x1F300, 0x1F650), range(0x1F900, 0x1FA00)),  # flags and emoji
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def save_unicode_tokenizer(folder: Path) -> int:
    """Write the tokenizer's files; return the number of its tokens."""
    written = dict(zip(range(256), byte_characters(), strict=True))
    vocab = {character: byte for byte, character in written.items()}
    merges: list[tuple[str, str]] = []
    texts = [start + word for word in ENGLISH.split() for start in ("", " ")]
    characters = [chr(code) for script in SCRIPTS for code in script]
    for text in [*texts, *characters, *(f" {character}" for character in characters[::16])]:
        name = ""
        for byte in text.encode():
            joined = name + written[byte]
            if joined not in vocab:
                vocab[joined] = len(vocab)
                merges.append((name, written[byte]))
            name = joined
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(WORDS, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[2], "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id(SPECIAL[2])}))
    return tokenizer.get_vocab_size()


def byte_characters() -> list[str]:
    """Return how byte-level vocabularies write each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]

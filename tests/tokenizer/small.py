"""Small tokenizers of every kind that the decoders know, built on the spot."""

from __future__ import annotations

import string

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

SPECIAL = ["<s>", "</s>"]


def byte_level(added: tuple[str, ...] = ("<think>", "with space é", "中文", "Ã¤")) -> Tokenizer:
    """GPT-2's kind: all bytes, a few merges, and added tokens in and out of the byte alphabet."""
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ã", "©"), ("ä", "¸"), ("#", "#")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(list(added))
    return tokenizer


def converted_gguf() -> Tokenizer:
    """Decoder of transformers 5.17 for a byte-level GGUF file: steps before ByteLevel that have nothing to do."""
    tokenizer = byte_level(added=("<think>",))
    steps = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.ByteLevel()]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def replaced() -> Tokenizer:
    """Return a byte-level tokenizer after a step that changes tokens, which excludes the fast decoder."""
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("Ġ", " "), decoders.ByteLevel()])
    return tokenizer


def suffix() -> Tokenizer:
    """OpenAI GPT's and FlauBERT's kind: the end of a word is marked. It has no fast way."""
    tokens = ["<unk>", *string.ascii_letters, *(f"{c}</w>" for c in string.ascii_letters), "</w>", "世</w>"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o</w>"), ("l", "d</w>")]
    tokens += [left + right for left, right in merges]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def llama(strip: int = 1) -> Tokenizer:
    """Llama 2's kind: bytes where the vocabulary lacks a character. Gemma's does not strip the first space."""
    tokens = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", *string.ascii_letters, *".,'!", "é", "世", ""]
    merges = [("▁", "▁"), ("h", "e"), ("▁", "he"), ("l", "l"), ("▁he", "ll"), ("▁hell", "o"), ("a", "b")]
    tokens += [left + right for left, right in merges]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", strip, 0)] if strip else steps)
    tokenizer.add_special_tokens(["<unk>", *SPECIAL])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """T5's kind."""
    tokens = ["<unk>", "▁", *string.ascii_letters, ".", "▁the", "▁he", "llo", "▁▁", "é", "世", ""]
    tokenizer = Tokenizer(models.Unigram([(token, -float(i)) for i, token in enumerate(tokens)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def wordpiece() -> Tokenizer:
    """BERT's kind."""
    tokens = ["[UNK]", *string.ascii_letters, *(f"##{c}" for c in string.ascii_lowercase), "##", "hello", "world"]
    tokens += [".", ",", "'", "n't", "do not", "##'s", "é", "世"]
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def words() -> Tokenizer:
    """No decoder: tokens are joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "hello": 3, "世": 4}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


KINDS = {
    "byte_level": byte_level,
    "llama": llama,
    "gemma": lambda: llama(strip=0),
    "strip_two": lambda: llama(strip=2),
    "metaspace": metaspace,
    "wordpiece": wordpiece,
    "words": words,
    "converted_gguf": converted_gguf,
    "replaced": replaced,
    "suffix": suffix,
}

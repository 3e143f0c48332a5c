"""The real vocabulary of the Qwen family as a tokenizer folder, without a model hub.

The PyPI package `dashscope` (Apache-2.0) carries the vocabulary as a tiktoken file: tokens and their ranks. This
downloads its wheel once into the user's cache, and builds a tokenizer.json with the family's special tokens from it.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from support.unicode_tokenizer import byte_characters

PACKAGE = "dashscope==2.0.2"
MEMBER = "dashscope/resources/qwen.tiktoken"
SHA256 = "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186"

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["endoftext", "im_start", "im_end"]
SPECIAL += [f"{what}_{end}" for what in ("object_ref", "box", "quad", "vision") for end in ("start", "end")]
SPECIAL += ["vision_pad", "image_pad", "video_pad"]
PLAIN = ["<tool_call>", "</tool_call>"]
PLAIN += [f"<|{name}|>" for name in ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep")]
PLAIN += ["<tool_response>", "</tool_response>", "<think>", "</think>"]

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}"""


class Unavailable(Exception):
    """Says that the tokenizer is neither in the cache nor available from the package index."""


@functools.cache
def qwen_folder() -> Path:
    """A folder with tokenizer.json, tokenizer_config.json and generation_config.json."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minisgl-tests"
    folder = cache / f"qwen-{SHA256[:12]}-{_recipe()}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            ranks = _download(Path(scratch))
            built = Path(scratch) / "qwen"
            built.mkdir()
            _write(ranks, built)
            try:
                built.rename(folder)
            except OSError:  # another test run was faster
                if not folder.is_dir():
                    raise
    return folder


def _recipe() -> str:
    """Changes with this file, so that the cache never holds what an older version of it made."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]


def _download(scratch: Path) -> dict[bytes, int]:
    wheels = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minisgl-tests" / "wheels"
    found = sorted(wheels.glob("dashscope-*.whl"))
    if not found:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--retries",
            "1",
            "--timeout",
            "15",
        ]
        try:
            subprocess.run([*command, "--dest", scratch, PACKAGE], check=True, capture_output=True, timeout=120)
        except (OSError, subprocess.SubprocessError) as error:
            detail = getattr(error, "stderr", None) or str(error).encode()
            reason = detail.decode(errors="replace").strip().splitlines()[-1:]
            raise Unavailable(f"the Qwen vocabulary is not cached and pip cannot fetch {PACKAGE}: {reason}") from None
        wheels.mkdir(exist_ok=True)
        found = [Path(shutil.move(path, wheels)) for path in scratch.glob("dashscope-*.whl")]
    raw = zipfile.ZipFile(found[0]).read(MEMBER)
    if hashlib.sha256(raw).hexdigest() != SHA256:
        raise Unavailable(f"{found[0]} does not hold the expected vocabulary")
    return {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, raw.splitlines())}


def _write(ranks: dict[bytes, int], folder: Path) -> None:
    written = byte_characters()
    name = {token: "".join(written[byte] for byte in token) for token in ranks}
    by_rank = sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__)
    merges = [tuple(name[part] for part in _last_merge(token, ranks)) for token in by_rank]
    tokenizer = Tokenizer(models.BPE({name[token]: rank for token, rank in ranks.items()}, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", normalized=False) for name in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in PLAIN])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 131072,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643]}, indent=2))


def _last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens that byte pair encoding joins to get this one."""
    cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
    known = [cut for cut in cuts if all(ranks.get(part, ranks[token]) < ranks[token] for part in cut)]
    if len(known) == 1:
        return known[0]
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:  # encode it with the merges that come before its own
        pairs = [ranks.get(left + right, ranks[token]) for left, right in itertools.pairwise(parts)]
        at = min(range(len(pairs)), key=pairs.__getitem__)
        if pairs[at] >= ranks[token]:
            raise ValueError(f"no merge makes {token!r}")
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]

"""A program whose LLM nobody closes: `python -m support.unclosed TP_SIZE WAY`. It prints the answers' token ids."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from minisgl import LLM, SamplingParams
from minisgl.config import ConfigError
from minisgl.engine.engine import Engine
from support.server import PATIENCE

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def make(tp_size: int, longest: int = 512, dtype: str = "float32", **settings: Any) -> LLM:
    return LLM("demo", dtype, tp_size=tp_size, max_running_req=2, max_seq_len_override=longest, **settings)


def tokens_of(llm: LLM) -> list[int]:
    return llm.generate("one two", PARAMS)[0]["token_ids"]


def exits(tp_size: int, keep: Callable[[LLM], None]) -> list[list[int]]:
    llm = make(tp_size)
    keep(llm)
    return [tokens_of(llm)]


def exits_in_a_call(tp_size: int, keep: Callable[[LLM], None]) -> list[list[int]]:
    """A daemon thread is in a call that does not end by itself."""
    llm = make(tp_size)
    keep(llm)
    answers = [tokens_of(llm)]
    endless = SamplingParams(max_tokens=500, ignore_eos=True)
    threading.Thread(target=llm.generate, args=(["one"] * 5000, endless), daemon=True).start()
    while llm._num_seqs != 5000:
        time.sleep(0.01)
    return answers


def frees_it(tp_size: int, keep: Callable[[LLM], None]) -> list[list[int]]:
    """A second LLM follows, as in a notebook."""
    first = tokens_of(make(tp_size))
    return [first, *exits(tp_size, keep)]


def cannot_start_it(tp_size: int, keep: Callable[[LLM], None]) -> list[list[int]]:
    """The ranks have met when it fails; a second LLM follows."""
    try:
        make(tp_size, longest=1 << 30)
    except ConfigError as error:
        assert "positions end at" in str(error), error  # noqa: PT017
        return exits(tp_size, keep)
    raise AssertionError("a context of 2^30 tokens was accepted")


def cannot_end_its_start(tp_size: int, keep: Callable[[LLM], None]) -> list[list[int]]:
    """Ctrl-C comes when its graphs, on GPUs, have been captured with NCCL's collectives; a second LLM follows."""
    with patch.object(Engine, "_step_cost", side_effect=KeyboardInterrupt):
        try:
            make(tp_size, dtype="bfloat16", custom_all_reduce=False)
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("the start was not interrupted")
    return exits(tp_size, keep)


WAYS = {way.__name__: way for way in (exits, exits_in_a_call, frees_it, cannot_start_it, cannot_end_its_start)}


def run_unclosed(tp_size: int, way: str) -> list[list[int]]:
    """Run the program to its end; return its answers."""
    command = [sys.executable, "-m", "support.unclosed", str(tp_size), way]
    tests = Path(__file__).parents[1]
    ended = subprocess.run(command, cwd=tests, stdout=subprocess.PIPE, timeout=PATIENCE, check=True)
    answers: list[list[int]] = json.loads(ended.stdout.splitlines()[-1])
    return answers


if __name__ == "__main__":
    kept: list[LLM] = []
    print(json.dumps(WAYS[sys.argv[2]](int(sys.argv[1]), kept.append)), flush=True)

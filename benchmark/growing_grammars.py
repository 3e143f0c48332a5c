"""Memory of a process that follows grammars which grow with every token, beside schemas that do not.

No model runs: tokens are chosen by chance from those that the grammars allow, out of a random vocabulary. Every 100
steps it prints by how much the resident memory has grown, and how many requests have ended with an error.

    python benchmark/growing_grammars.py
    python benchmark/growing_grammars.py --hostile 0 --schemas 64    # the cost of a step
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from itertools import count
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from measuring.arguments import make_parser
from minisgl.sampling_params import Grammar, SamplingParams
from minisgl.structured_output.heap import allocated_bytes
from minisgl.structured_output.matcher import GrammarMatcher, GrammarMatchers
from minisgl.structured_output.protocol import MatcherStatus

EOS = "<|end|>"
PRINTED = 100  # steps between two lines
FAILURES = (MatcherStatus.FAILED, MatcherStatus.TOO_LARGE)
ENDING = 200  # steps after which a quarter of the hostile requests end


def random_tokenizer(vocab_size: int) -> Tokenizer:
    """Return a byte-level tokenizer of random words of 2 to 8 letters."""
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789Ġ"
    vocab = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    while len(vocab) < vocab_size:
        vocab.setdefault("".join(rng.choices(letters, k=rng.randint(2, 8))), len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    return tokenizer


def growing(number: int) -> Grammar:
    """Return a regular expression whose automaton has another state for each text so far."""
    return Grammar("regex", f"(.*a.{{{300 + number}}}Z|.*b.{{500}}Y|.*c.{{700}}X)")


def schema(number: int) -> Grammar:
    item = {
        "type": "object",
        "properties": {f"x{number}": {"type": "string"}, "n": {"type": "number"}},
        "required": ["n"],
    }
    properties = {f"k{number}_{index}": {"type": "array", "items": item} for index in range(5)}
    text = json.dumps({"type": "object", "properties": properties, "required": [f"k{number}_0"]})
    return Grammar("closed_json_schema", text)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--hostile", type=int, default=48, metavar="N", help="requests whose grammars grow")
    parser.add_argument("--schemas", type=int, default=16, metavar="N", help="requests with a schema")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="steps")
    parser.add_argument("--vocab-size", type=int, default=38_000, metavar="N", help="tokens of the vocabulary")
    args = parser.parse_args()

    tokenizer = random_tokenizer(args.vocab_size)
    vocab_size, eos = tokenizer.get_vocab_size(), tokenizer.token_to_id(EOS)
    assert eos is not None
    matchers = GrammarMatchers(lambda: tokenizer, vocab_size=vocab_size, eos_token_ids=[eos])
    matchers.prepare().result()
    numbers, rng = count(), np.random.default_rng(0)

    def start(row: int) -> GrammarMatcher:
        grammar = schema(row) if row < args.schemas else growing(next(numbers))
        return matchers.start(SamplingParams(grammar=grammar))

    before, before_allocated = resident_bytes(), allocated_bytes()
    running: list[GrammarMatcher | None] = [start(row) for row in range(args.schemas + args.hostile)]
    bitmask = np.zeros((len(running), -(-vocab_size // 32)), dtype=np.int32)
    failed, peak, times = {"schemas": 0, "hostile": 0}, 0, []
    for step in range(1, args.steps + 1):
        begin = time.perf_counter()
        matchers.fill(bitmask, running)
        times.append(time.perf_counter() - begin)
        bits = np.unpackbits(bitmask.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size]
        tokens = np.array([rng.choice(np.flatnonzero(row)) for row in bits], dtype=np.int32)
        statuses = matchers.advance([one for one in running if one is not None], tokens)
        for row, status in enumerate(statuses):
            is_leaving = step % ENDING == 0 and 0 <= row - args.schemas < args.hostile // 4
            if status is not MatcherStatus.OPEN or is_leaving:
                failed["schemas" if row < args.schemas else "hostile"] += status in FAILURES
                running[row] = None  # its automaton is idle now, or freed
                running[row] = start(row)
        peak = max(peak, resident_bytes() - before)
        if step % PRINTED == 0:
            print(
                f"step {step:5}: resident {(resident_bytes() - before) / 1e6:6.0f} MB (peak {peak / 1e6:6.0f}), "
                f"allocated {(allocated_bytes() - before_allocated) / 1e6:6.0f} MB, failed {failed}, "
                f"bitmask {statistics.median(times[-PRINTED:]) * 1e3:7.2f} ms",
                flush=True,
            )
    begin = time.perf_counter()
    for _ in range(1000):
        allocated_bytes()
    print(f"reading the allocated memory takes {(time.perf_counter() - begin) * 1e3:.1f} us")


if __name__ == "__main__":
    main()

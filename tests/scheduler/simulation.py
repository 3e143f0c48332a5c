"""A simulated device that executes plans as an engine would, and detects any corruption of the KV cache.

Each place of the simulated KV pool holds the hash of all tokens up to the one written there. Before a row extends, all
places of its prefix must hold what this very sequence put (or would have put) there; the sampled token is a function
of the prefix. So a page with two owners, a late write into a reused row or a wrong prefix hit shows at once. The state
of a recurrent layer is the hash of all tokens that its slot has seen: a row that begins behind a prefix must find it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from minisgl.config import SchedulerConfig
from minisgl.core import NO_TOKEN, Batch, DeviceOutOfMemory, Int32Array, Logprobs, StepResult
from minisgl.kvcache.base import empty_pages
from minisgl.kvcache.window import WindowGroup, usual_ratio, windowed_pages
from minisgl.message.logprobs import LogprobRows, PositionLogprobs, unpack_logprobs
from minisgl.message.packed_ids import unpack_ids
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.cache_pools import make_pools
from minisgl.scheduler.loop import StepLoop
from minisgl.scheduler.requests.request_pages import RequestPages
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.steps.token_scores import pack_logprobs
from minisgl.step_cost import StepCost
from minisgl.structured_output.protocol import Matcher, MatcherStatus

VOCAB = 50
EOS = 7
NAN = -2  # in place of a hash, in the KV cache and in states


def extend_hash(prefix: int, token: int) -> int:
    return hash((prefix, token))


def next_token(prefix: int, allowed: set[int] | None = None) -> int:
    """Return the simulated model's token after a prefix: its favourite, or the next that is allowed."""
    token = prefix % VOCAB
    while allowed is not None and token not in allowed:
        token = (token + 1) % VOCAB
    return token


def allowed_by(words: Int32Array) -> set[int]:
    return {token for token in range(VOCAB) if words[token // 32] >> token % 32 & 1}


@dataclass
class SimulatedMatcher:
    """A grammar of a number of tokens, of which each depends on all before."""

    length: int
    state: int = 0
    count: int = 0
    polls: int = 2  # until it is compiled

    @property
    def is_compiling(self) -> bool:
        self.polls -= 1
        return self.polls >= 0

    def allowed(self) -> set[int]:
        tokens = {token for token in range(VOCAB) if (token + self.state) % 3 == 0}
        return tokens | {EOS} if self.state % 4 == 0 else tokens - {EOS}

    def advance(self, token: int) -> MatcherStatus:
        if token not in self.allowed():
            return MatcherStatus.FAILED
        self.state, self.count = extend_hash(self.state, token) % 1000, self.count + 1
        return MatcherStatus.COMPLETE if token == EOS or self.count == self.length else MatcherStatus.OPEN


class SimulatedGrammars:
    """A grammar's text is its length."""

    def start(self, sampling: SamplingParams) -> SimulatedMatcher:
        assert sampling.grammar is not None
        return SimulatedMatcher(int(sampling.grammar.text))

    def advance(self, matchers: Sequence[Matcher], tokens: Int32Array) -> list[MatcherStatus]:
        return [own(matcher).advance(token) for matcher, token in zip(matchers, tokens.tolist(), strict=True)]

    def fill(self, mask: Int32Array, matchers: Sequence[Matcher | None]) -> None:
        mask.fill(0)
        for row, matcher in zip(mask.view(np.uint32), matchers, strict=True):
            for token in range(VOCAB) if matcher is None else own(matcher).allowed():
                row[token // 32] |= np.uint32(1 << token % 32)


def own(matcher: Matcher) -> SimulatedMatcher:
    assert isinstance(matcher, SimulatedMatcher)
    return matcher


def expected_answer(prompt: Int32Array, params: SamplingParams) -> list[int]:
    """The whole answer of the simulated model."""
    prefix = 0
    for token in prompt.tolist():
        prefix = extend_hash(prefix, token)
    answer: list[int] = []
    assert params.max_tokens is not None
    matcher = None if params.grammar is None else SimulatedGrammars().start(params)
    while len(answer) < params.max_tokens:
        answer.append(next_token(prefix, None if matcher is None else matcher.allowed()))
        if matcher is not None and matcher.advance(answer[-1]) is not MatcherStatus.OPEN:
            break
        if answer[-1] == EOS and not params.ignore_eos:
            break
        prefix = extend_hash(prefix, answer[-1])
    return answer


def logprobs_after(scored: list[tuple[int, int]], top: int) -> Logprobs:
    """Return the simulated model's scores of (prefix, the token after it)."""
    if not scored:
        none = np.empty((0, top), dtype=np.float32)
        return Logprobs(np.empty(0, np.float32), np.empty(0, np.int32), none.astype(np.int32), none)
    return Logprobs(
        chosen=np.array([-(hash(pair) % 997) for pair in scored], dtype=np.float32),
        ranks=np.array([prefix % VOCAB + 1 for prefix, _ in scored], dtype=np.int32),
        top_ids=np.array([[(prefix + i) % VOCAB for i in range(top)] for prefix, _ in scored], dtype=np.int32),
        top=np.array([[-float(i) for i in range(top)] for _ in scored], dtype=np.float32),
    )


def expected_logprobs(seq_id: int, before: list[int], tokens: list[int], top: int) -> LogprobRows:
    """Rows of a sequence's tokens that come after others."""
    prefix, scored = 0, []
    for token in before:
        prefix = extend_hash(prefix, token)
    for token in tokens:
        scored.append((prefix, token))
        prefix = extend_hash(prefix, token)
    ids = np.array(tokens, dtype=np.int32)
    return pack_logprobs([seq_id], [len(tokens)], [top], ids, [logprobs_after(scored, top)])


class NoText:
    """A vocabulary."""

    def token_bytes(self, _: int) -> bytes:
        return b""

    def is_special(self, _: int) -> bool:
        return False


class SimulatedDevice:
    """Slots, page table and KV pool; a plan runs as late as a device may run it, when its result is requested.

    Steps for which `fails` returns True find no memory: at their launch (`fails_at_launch`, as on a CUDA stream), or
    when their result is asked for, as in a thread. What they and all steps behind them touch is then worth nothing.

    A row computes NaN from the middle of its tokens on if `computes_nan` returns True for its slot; so does every later
    row that reads such a token.
    """

    def __init__(
        self,
        page_size: int,
        fails: Callable[[Batch], bool] = lambda _: False,
        *,
        fails_at_launch: bool = False,
        computes_nan: Callable[[int], bool] = lambda _: False,
        has_states: bool = False,
        scratch_slot: int = -1,
        window: int | None = None,
    ) -> None:
        self._scratch_slot = scratch_slot  # of a captured graph's padding rows, which leave a state there
        self._has_states = has_states
        self._window = window  # for layers with their own pages
        self._fails = fails
        self._fails_at_launch = fails_at_launch
        self._computes_nan = computes_nan
        self.failures = 0
        self.page_size = page_size
        self.tokens: dict[int, list[int]] = {}
        self.pages: dict[int, dict[int, int]] = {}
        self.window_pages: dict[int, dict[int, int]] = {}
        self.kv: dict[tuple[int, int], int] = {}
        self.window_kv: dict[tuple[int, int], int] = {}
        self.states: dict[int, tuple[int, int]] = {}  # by row: position, hash of the tokens before
        self.computed = 0
        self.bitmask = np.zeros((1024, -(-VOCAB // 32)), dtype=np.int32)  # one memory for all steps, as an engine has
        self._queue: list[_Launched] = []
        self._unsampled: _Launched | None = None  # the step whose sampling is not launched yet

    def forward(self, batch: Batch) -> None:
        launched = _Launched(self, batch)
        if self._fails(batch):
            self.failures += 1
            if self._fails_at_launch:
                self.run_all()
                self._spoil(batch)
                raise DeviceOutOfMemory("simulated")
            launched.fails = True
        self._queue.append(launched)
        self._unsampled = launched

    def sample(self, batch: Batch, bitmask: Int32Array | None = None) -> _Launched:
        launched, self._unsampled = self._unsampled, None
        assert launched is not None
        assert launched.batch is batch
        launched.sampled, launched.bitmask = True, bitmask
        return launched

    def run_all(self) -> None:
        if self._queue:
            self.run_until(self._queue[-1])

    def run_until(self, wanted: _Launched) -> None:
        while wanted.result is None:
            if wanted.failed:
                raise DeviceOutOfMemory("simulated")
            launched = self._queue.pop(0)
            if launched.fails:
                for spoiled in [launched, *self._queue]:
                    self._spoil(spoiled.batch)
                    spoiled.failed = True
                self._queue.clear()
                continue
            assert launched.sampled
            assert launched.batch.constrained == (launched.bitmask is not None)
            launched.result = self._run(launched.batch, launched.bitmask)

    def _spoil(self, batch: Batch) -> None:
        """Leave of a step what could be worst: the rows it names lost, garbage in all pages that it may write."""
        self._apply(batch)
        for slot, start, length in zip(batch.slots.tolist(), batch.start_pos, batch.query_lens, strict=True):
            for position in range(int(start), int(start + length)):
                for kv, place in self._places(slot, position):
                    kv[place] = -1
        for slot in {*batch.slots.tolist(), *(row.slot for row in batch.new_rows)}:
            self.tokens[slot] = []  # pages stay: those behind it in the queue write to them
        for row in [*batch.slots.tolist(), *(target for _, target in batch.state_copies)]:
            self.states[row] = (-1, -1)

    def _apply(self, batch: Batch) -> None:
        for row in batch.new_rows:
            self.pages[row.slot] = dict(enumerate(row.pages.tolist()))
            assert (row.window_pages is None) == (self._window is None)
            if row.window_pages is not None:
                assert len(row.window_pages) == len(row.pages)
                self.window_pages[row.slot] = dict(enumerate(row.window_pages.tolist()))
        for slot, index, page, *windowed in batch.new_pages.tolist():
            assert index == len(self.pages[slot]), "pages come in order"
            self.pages[slot][index] = page
            assert len(windowed) == (self._window is not None)
            if windowed:
                self.window_pages[slot][index] = windowed[0]

    def _places(self, slot: int, position: int) -> list[tuple[dict[tuple[int, int], int], tuple[int, int]]]:
        """Return the place of a position in each group of layers."""
        index, offset = divmod(position, self.page_size)
        places = [(self.kv, (self.pages[slot][index], offset))]
        if self._window is not None:
            places.append((self.window_kv, (self.window_pages[slot][index], offset)))
        return places

    def _run(self, batch: Batch, bitmask: Int32Array | None) -> StepResult:
        for row in batch.new_rows:
            self.tokens[row.slot] = row.token_ids.tolist()
        self._apply(batch)
        for source, target in batch.state_copies:
            self.states[target] = self.states[source]
        self.states[self._scratch_slot] = (-1, -1)
        sampled: list[int] = []
        prefixes: list[int] = []  # hashes that the sampled tokens follow
        scored: list[tuple[int, int]] = []  # (hash before, token) of prompts
        wanted = np.zeros_like(batch.query_lens) if batch.logprobs is None else batch.logprobs.prompt_lens
        rows = zip(batch.slots, batch.start_pos, batch.query_lens, batch.needs_sample, wanted, strict=True)
        for slot, start, length, samples, asked in (
            (int(a), int(b), int(c), bool(d), int(e)) for a, b, c, d, e in rows
        ):
            assert 0 <= asked <= length, "log-probabilities of what the step does not compute"
            tokens, prefix, is_nan = self.tokens[slot], 0, False
            first_nan = start + length // 2 if self._computes_nan(slot) else start + length
            for position in range(start + length):
                if self._has_states and position == start > 0:
                    at, state = self.states[slot]
                    assert at == start, f"slot {slot}: its state is not that at {start}"
                    assert state in (prefix, NAN), f"slot {slot}: its state is another's"
                    is_nan |= state == NAN
                prefix = hash((prefix, tokens[position]))
                (kv, place), *windowed = self._places(slot, position)
                if position < start:
                    assert kv[place] in (prefix, NAN), f"slot {slot}: the cache of position {position} is another's"
                    is_nan |= kv[place] == NAN
                    for kv, place in windowed:
                        if self._window is not None and position > start - self._window:
                            assert kv[place] in (prefix, NAN), f"slot {slot}: position {position} left the window"
                            is_nan |= kv[place] == NAN
                else:
                    is_nan |= position >= first_nan
                    kv[place] = NAN if is_nan else prefix
                    for kv, place in windowed:
                        kv[place] = NAN if is_nan else prefix
                    if position < start + asked:
                        scored.append((prefix, tokens[position + 1]))
            self.states[slot] = (start + length, NAN if is_nan else prefix)
            self.computed += length
            assert samples == (start + length == len(tokens)), "a row samples iff it reaches the last known token"
            if samples:
                allowed = None if bitmask is None else allowed_by(bitmask[len(sampled)])
                tokens.append(next_token(prefix, allowed))
                sampled.append(NO_TOKEN if is_nan else tokens[-1])
                prefixes.append(prefix)
        tokens = np.array(sampled, dtype=np.int32)
        if batch.logprobs is None:
            return StepResult(tokens)
        output = [(prefixes[row], sampled[row]) for row in batch.logprobs.rows.tolist()]
        prompt_logprobs = logprobs_after(scored, batch.logprobs.prompt_top) if scored else None
        return StepResult(tokens, logprobs_after(output, batch.logprobs.top), prompt_logprobs)


@dataclass(slots=True, eq=False)
class _Launched:
    device: SimulatedDevice
    batch: Batch
    result: StepResult | None = None
    sampled: bool = False
    bitmask: Int32Array | None = None
    fails: bool = False
    failed: bool = False

    def __call__(self) -> StepResult:
        self.device.run_until(self)
        assert self.result is not None
        return self.result


# Decodes that cost so much beside chunks that they never stand there.
ALWAYS_IN_TURNS = StepCost(prefill_token=1e-3, decode_row=1.0, alone_fixed=1e-9)


@dataclass
class World:
    """A scheduler with a simulated device, and what came out for each sequence."""

    page_size: int = 4
    num_pages: int = 64
    num_slots: int = 8
    max_seq_len: int = 100
    chunk: int = 16
    batch_policy: str = "prefill-first"
    schedule_policy: str = "fcfs"
    cache: str = "radix"
    overlap: bool = True
    snapshots: int = 0  # snapshots of recurrent state; 0 means a model without states
    snapshot_distance: int = 4
    window: int | None = None
    num_window_pages: int | None = None  # None: as the engine would choose, with sequences of two windows
    cost: StepCost | None = None
    target_tbt: float = 35.0  # milliseconds, by `cost`
    fails: Callable[[Batch], bool] = lambda _: False
    fails_at_launch: bool = False
    computes_nan: Callable[[int], bool] = lambda _: False
    answers: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    entered: list[int] = field(default_factory=list)  # in their order
    logprobs: dict[int, list[PositionLogprobs]] = field(default_factory=dict)  # for each output token, where requested
    prompt_logprobs: dict[int, LogprobRows] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device = SimulatedDevice(
            self.page_size,
            self.fails,
            fails_at_launch=self.fails_at_launch,
            computes_nan=self.computes_nan,
            has_states=self.snapshots > 0,
            scratch_slot=self.num_slots,
            window=self.window,
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_prefill_tokens=self.chunk,
                batch_policy=self.batch_policy,  # type: ignore[arg-type]
                schedule_policy=self.schedule_policy,  # type: ignore[arg-type]
                target_tbt=self.target_tbt,
                state_snapshot_distance=self.snapshot_distance,
            ),
            make_pools(
                self.cache,  # type: ignore[arg-type]
                self.page_size,
                self.num_pages,
                window=None if self.window is None else self._window_group(self.window),
                num_snapshots=self.snapshots,
            ),
            num_slots=self.num_slots,
            max_seq_len=min(self.max_seq_len, self.num_pages * self.page_size),
            eos_token_ids=(EOS,),
            grammars=SimulatedGrammars(),
            cost=self.cost,
        )
        # Time stands still: it must not decide what a test sees.
        self.loop = StepLoop(self.scheduler, self.device, overlap=self.overlap, clock=lambda: 0.0)

    def _window_group(self, window: int) -> WindowGroup:
        ratio = usual_ratio(window, self.page_size, 2 * window)
        chosen = windowed_pages(self.num_pages, ratio, window, self.page_size, self.chunk)
        return WindowGroup(window, self.num_window_pages or chosen)

    def add(
        self, seq_id: int, prompt: list[int] | Int32Array, *, priority: int = 0, salt: bytes = b"", **params: object
    ) -> None:
        self.answers[seq_id] = []
        sampling = SamplingParams(**params)  # type: ignore[arg-type]
        self.scheduler.add(seq_id, np.array(prompt, dtype=np.int32), sampling, seed=0, priority=priority, salt=salt)

    def step(self) -> None:
        output = self.loop.step()
        if self.scheduler._next_step % 20 == 0:  # not every step, because the check is slow
            check_windows(self.scheduler._pages)
        self.entered += [opened.seq_id for opened in output.opened]
        self.cached.update((opened.seq_id, opened.cached_tokens) for opened in output.opened)
        for seq_id, token in zip(output.seq_ids, unpack_ids(output.tokens).tolist(), strict=True):
            assert seq_id not in self.ends, "a token after the end"
            self.answers[seq_id].append(token)
        ended = {end.seq_id for end in output.ended}
        if output.logprobs is not None:
            for seq_id, (position,) in unpack_logprobs(output.logprobs, NoText()).items():
                assert seq_id in output.seq_ids
                self.logprobs.setdefault(seq_id, []).append(position)
        for rows in output.prompt_logprobs:
            (seq_id,) = rows.seq_ids
            assert seq_id not in self.prompt_logprobs, "reported twice"
            assert len(self.answers[seq_id]) == 1 or seq_id in ended, "neither with the first token nor at the end"
            self.prompt_logprobs[seq_id] = rows
        for end in output.ended:
            assert end.seq_id not in self.ends, "ended twice"
            assert end.seq_id in self.cached, "ended without having been opened"
            self.ends[end.seq_id] = end.reason

    def check_logprobs(self, seq_id: int, prompt: list[int], params: SamplingParams) -> None:
        """Check an ended sequence: a row for each token if asked for, and all of the prompt unless it ended before."""
        answer, found = self.answers[seq_id], self.logprobs.pop(seq_id, [])
        if params.logprobs is None:
            assert found == []
        else:
            expected = expected_logprobs(seq_id, prompt, answer, params.logprobs)
            assert found == unpack_logprobs(expected, NoText())[seq_id]
        scores = self.prompt_logprobs.pop(seq_id, None)
        if params.prompt_logprobs is None or len(prompt) == 1:
            assert scores is None
        elif answer or self.ends[seq_id] == "length":
            assert scores == expected_logprobs(seq_id, prompt[:1], prompt[1:], params.prompt_logprobs)

    def check_answer(self, seq_id: int, prompt: list[int], params: SamplingParams) -> bool:
        """Check an ended request's answer, which may have been cut short; return True if it is complete."""
        answer, expected = self.answers.pop(seq_id), expected_answer(np.array(prompt), params)
        complete = self.ends[seq_id] == "length" or (answer[-1:] == [EOS] and not params.ignore_eos)
        assert answer == (expected if complete else expected[: len(answer)])
        return complete

    def run(self) -> None:
        while self.loop.has_work:
            self.step()
        self.scheduler.check_idle()


def check_windows(pages: RequestPages) -> None:
    """Raise BrokenInvariant if a windowed page has no owner or two."""
    windows, table = pages._windows, pages._table
    if windows is None:
        return
    rows = [slot for slot, request in enumerate(table.requests) if request is not None]
    held = [windows._pages[slot, windows._first_own(slot) : table.num_pages[slot]] for slot in rows]
    windows.pool.check(pages._cache.owned_pages(), np.concatenate([*held, empty_pages()]))


def random_prompt(rng: random.Random, families: int, longest: int) -> list[int]:
    """Prompts that share prefixes: a family's text, cut, with an ending of its own."""
    family = random.Random(rng.randrange(families))
    text = [family.randrange(VOCAB) for _ in range(longest)]
    length = rng.randint(1, longest)
    own = rng.randint(0, length)
    return text[: length - own] + [rng.randrange(VOCAB) for _ in range(own)]


Asked = tuple[list[int], SamplingParams]  # prompt and parameters of a request


def random_traffic(
    world: World,
    rng: random.Random,
    count: int,
    requests: dict[int, Asked],
    more: Callable[[], dict[str, object]] = dict,
) -> Iterator[int]:
    """Add `count` random prompts or a few more, abort some, and run the world; yield each request's id at its end.

    `requests` gets what was asked, by id. `more` returns parameters of a request besides its length and ends.
    """
    open_sequences: set[int] = set()
    while len(requests) < count or world.loop.has_work:
        if len(requests) < count and len(open_sequences) < 30 and rng.random() < 0.5:
            for _ in range(rng.randint(1, 4)):
                seq_id = len(requests)
                prompt = random_prompt(rng, families=4, longest=40)
                params: dict[str, object] = {"max_tokens": rng.randint(1, 40), "ignore_eos": rng.random() < 0.5}
                params |= more()
                requests[seq_id] = prompt, SamplingParams(**params)  # type: ignore[arg-type]
                world.add(seq_id, prompt, **params)
                open_sequences.add(seq_id)
        if open_sequences and rng.random() < 0.03:
            world.scheduler.end(rng.choice(sorted(open_sequences)), "abort")
        world.step()
        for seq_id in open_sequences & world.ends.keys():
            open_sequences.remove(seq_id)
            yield seq_id

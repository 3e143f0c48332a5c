"""LLM: generation and embeddings from Python, without a server: scheduler and engine are in the caller's process.

The parameters are those of Mini-SGLang's LLM, so that programs written for it run unchanged.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from inspect import Signature
from typing import Any, ClassVar

import numpy as np
import torch

from minisgl.config import ServerConfig
from minisgl.core import Int32Array
from minisgl.engine.device import join_ranks
from minisgl.engine.engine import Engine
from minisgl.llm.completion import Completion, OutputCollector
from minisgl.llm.interrupts import Interrupts
from minisgl.llm.keywords import read_settings, signature
from minisgl.llm.params import default_params, resolve_params
from minisgl.llm.rank_processes import RankLost, RankProcesses
from minisgl.message.control import Progress
from minisgl.message.shared import TextOptions
from minisgl.message.to_tokenizer import ConversationMessage, PairPrompt
from minisgl.models.config.generation_config import load_sampling_defaults
from minisgl.models.download_process import download_interruptibly
from minisgl.models.hub import find_model
from minisgl.models.load_config import load_engine_model
from minisgl.pooling.pooling_config import NO_TEXT, NO_VECTORS, PoolingConfig
from minisgl.pooling.vectors import Float32Array, activated, check_dimensions, cosine, embedding
from minisgl.progress import progress_bar
from minisgl.sampling_params import InvalidRequest, SamplingParams, room_for_output
from minisgl.scheduler.assembly import make_loop, reuses_prefixes
from minisgl.scheduler.loop import StepCounts
from minisgl.seeds import choice_seed, random_seed
from minisgl.structured_output.matcher import GrammarMatchers
from minisgl.structured_output.translate import named_tokens
from minisgl.structured_output.validator import GrammarValidator
from minisgl.tokenizer.admission import check_vocabulary
from minisgl.tokenizer.conversation import template_messages
from minisgl.tokenizer.decoder_choice import make_decoder
from minisgl.tokenizer.detokenizer import Detokenizer
from minisgl.tokenizer.pairs import encode_pair
from minisgl.tokenizer.text import TextTokenizer

_NO_PROMPT = "a prompt must be a text or a list of token ids"
_STEPS_TO_REST = 4  # more steps than can be in flight
_GRACE = 2.0  # seconds for a call to fail

Prompt = str | Sequence[int]


class LLM:
    """A loaded model. Raises ConfigError if it cannot be loaded; `close` (or `with`) frees the device.

    `settings` are those of `SourceConfig`, `EngineConfig` and `SchedulerConfig` (`minisgl.config`) under their
    keywords, which `help(LLM)` lists with types and defaults; None stands for the default, and an unknown keyword is a
    TypeError. `use_dummy_weight=True` is `load_format="dummy"`.

    It may be called from several threads: the calls are executed one after another. A process that is forked from the
    one that made it cannot call it. Ctrl-C ends a call between two steps, and the next call works. A second one comes
    at once, because a step may hang; if it leaves requests half changed, the next call says so.
    """

    __signature__: ClassVar[Signature] = signature()

    def __init__(
        self, model: str, dtype: str | torch.dtype = "auto", *, use_dummy_weight: bool = False, **settings: Any
    ) -> None:
        self._pid = os.getpid()
        if use_dummy_weight:
            settings["load_format"] = "dummy"
        settings |= {"model": model, "dtype": str(dtype).removeprefix("torch.")}
        source, config, scheduling = read_settings(settings)
        server = ServerConfig(source=source, engine=config, scheduler=scheduling, model_names=(model,))
        server.validate()
        weights = config.load_format != "dummy"
        folder, tokenizer_folder = find_model(source, weights=weights, download=download_interruptibly)
        server = server.located(folder, tokenizer_folder)
        config = server.engine
        model_config = load_engine_model(folder, config)
        self._pooling = pooling = model_config.pooling
        self._default_params = default_params(load_sampling_defaults(source.generation_config, folder))
        self.phases: dict[str, float] = {}  # seconds of each phase of the start
        phase = partial(_phase, self.phases)
        with phase("load tokenizer"):
            self.tokenizer = tokenizer = TextTokenizer.from_folder(
                tokenizer_folder,
                server.source.chat_template,
                causal_reranker=pooling is not None and pooling.is_causal_reranker,
            )
            self._decoder = make_decoder(tokenizer.tokenizer)
        self._lock = threading.Lock()  # held during a call
        self._interrupts = Interrupts()
        self._num_seqs = 0  # number of sequences of the current call, whose ids count from 0
        # Nothing in it refers to this object, which could not be freed otherwise.
        with ExitStack() as held:
            self._validator = GrammarValidator(named_tokens(tokenizer.tokenizer))
            held.callback(self._validator.close)
            self._ranks = RankProcesses(server)
            held.callback(self._ranks.close)
            with self._ranks.guard():
                tp = join_ranks(config, 0, self._ranks.addresses, self._ranks.check)
                held.callback(tp.close)
                self._ranks.watch(tp)
                self._engine = Engine(
                    config,
                    model_config,
                    tp=tp,
                    phase=phase,
                    progress=weights,
                    max_prefill_tokens=scheduling.max_prefill_tokens,
                    reuses_prefixes=reuses_prefixes(scheduling, model_config),
                )
                held.callback(self._engine.close)
                grammars = GrammarMatchers(
                    lambda: tokenizer.tokenizer,
                    vocab_size=model_config.vocab_size,
                    eos_token_ids=model_config.eos_token_ids,
                )
                followers = self._ranks.outboxes(self._engine.limits)
                self.loop = make_loop(scheduling, self._engine, model_config, followers, grammars)
                self.loop.wait = self._interrupts.wait
                self._ranks.watch_progress(partial(_progress, self._lock, self.loop.counts, self._engine.device))
            held.callback(self._ranks.end_if_lost)
            self._held = held.pop_all()
        self._end = weakref.finalize(self, _end, self._pid, self._lock, self._ranks, self._held)

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[Completion]:
        """Return completions of all prompts (texts or token ids; one text stands for a list of it) in order.

        One SamplingParams is for all prompts; a list has one for each prompt. The default is the model's
        generation_config.json, else SamplingParams. A `max_tokens` beyond the context is clipped to it, with a warning
        in the log. Raises InvalidRequest for the first prompt or parameter that cannot be served, before anything runs.
        """
        ids = self._encode_all(prompts)
        answers = self._run(ids, self._params_for(ids, sampling_params), use_tqdm, continues=True)
        return [answer.completion for answer in answers]

    def chat(
        self,
        messages: Sequence[ConversationMessage] | Sequence[Sequence[ConversationMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = False,
        **template_kwargs: Any,
    ) -> list[Completion]:
        """Return the completion of one conversation, or of several, in order.

        Messages have OpenAI's form. `tools`, `chat_template_kwargs` and all other keywords go to the chat template; a
        tool call is part of the text, as the model writes it. Raises InvalidRequest, which names the wrong field.
        """
        variables = {**(chat_template_kwargs or {}), **template_kwargs}
        ids = [
            self._known(self.tokenizer.encode_chat(template_messages(one), tools, variables))
            for one in _conversations(messages)
        ]
        answers = self._run(ids, self._params_for(ids, sampling_params), use_tqdm, continues=False)
        return [answer.completion for answer in answers]

    def embed(
        self,
        prompts: str | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        use_tqdm: bool = False,
    ) -> Float32Array:
        """Return the embeddings [prompts, dimensions] of texts or token ids, in order.

        `dimensions` None: all; `normalize` None: the model's default. Raises InvalidRequest, also if the model makes no
        embeddings.
        """
        pooling = self._pools("embedding")
        check_dimensions(dimensions, pooling)
        ids = self._encode_all(prompts)
        vectors = self._vectors(ids, use_tqdm)
        return _stacked(
            [embedding(vector, pooling, dimensions, normalize) for vector in vectors], dimensions or pooling.size
        )

    def classify(self, prompts: str | Sequence[Prompt], *, use_tqdm: bool = False) -> Float32Array:
        """Return the probability of each class [prompts, classes].

        Raises InvalidRequest, also if the model has no classes.
        """
        pooling = self._pools("classes")
        ids = self._encode_all(prompts)
        vectors = self._vectors(ids, use_tqdm)
        return _stacked([activated(vector, pooling.activation) for vector in vectors], pooling.size)

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        use_tqdm: bool = False,
    ) -> list[float]:
        """Return the score of each document for the query at the same index, or for the only query.

        A reranker's score is a probability; for an embedding model it is the cosine. `instruction` is for rerankers
        whose prompt has one. Raises InvalidRequest.
        """
        documents = [documents] if isinstance(documents, str) else documents
        queries = [queries] if isinstance(queries, str) else queries
        if len(queries) not in (1, len(documents)):
            raise InvalidRequest("queries", f"{len(queries)} queries, but {len(documents)} documents")
        pooling = self._pools()
        if pooling.makes == "embedding":
            vectors = self._vectors([self._encode(text) for text in [*queries, *documents]], use_tqdm)
            firsts = vectors[: len(queries)] * (len(documents) // len(queries))
            return [cosine(*pair) for pair in zip(firsts, vectors[len(queries) :], strict=True)]
        if not pooling.is_reranker:
            raise InvalidRequest("model", f"this model knows {pooling.size} classes and scores no pairs")
        pairs = zip(list(queries) * (len(documents) // len(queries)), documents, strict=True)
        limits = self._engine.limits
        ids = [
            self._known(encode_pair(PairPrompt(query, document, instruction), self.tokenizer, limits))
            for query, document in pairs
        ]
        return [float(activated(vector, pooling.activation)[0]) for vector in self._vectors(ids, use_tqdm)]

    def _pools(self, makes: str | None = None) -> PoolingConfig:
        """Return the model's pooling; InvalidRequest if it does not make vectors of this kind."""
        pooling = self._pooling
        if pooling is None:
            raise InvalidRequest("model", NO_VECTORS)
        if makes not in (None, pooling.makes):
            raise InvalidRequest("model", f"this model makes no {makes}, but {pooling.makes}")
        return pooling

    def _vectors(self, ids: list[Int32Array], use_tqdm: bool) -> list[Float32Array]:
        """Return the vector of each prompt."""
        params = SamplingParams(max_tokens=0)
        for one in ids:
            room_for_output(len(one), 0, self._engine.limits)
        answers = self._run(ids, [params] * len(ids), use_tqdm, continues=False)
        for answer in answers:
            if answer.cause == "logits_not_finite":
                raise RuntimeError("the model computes NaN or infinite values for one of the prompts")
            if answer.completion["finish_reason"] == "error":
                raise RuntimeError("the device has too little memory for one of the prompts alone")
        return [np.frombuffer(answer.vector, dtype="<f4") for answer in answers]

    def close(self) -> None:
        """End the engine and free its memory; the object cannot be used afterwards. May be called repeatedly."""
        if os.getpid() != self._pid:  # a forked process: engine and workers are those of its parent
            return
        with self._lock:
            self._end.detach()
            self._held.close()

    def __enter__(self) -> LLM:
        self._require_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def retractions(self) -> int:
        """Number of retractions since the start."""
        return self.loop.scheduler.retractions

    def check_idle(self) -> None:
        """Raise if anything is held although nothing runs."""
        self.loop.scheduler.check_idle()

    def _encode_all(self, prompts: str | Sequence[Prompt]) -> list[Int32Array]:
        if isinstance(prompts, Mapping):  # vLLM's form of a prompt, whose keys would be taken for prompts
            raise InvalidRequest("prompt", _NO_PROMPT)
        return [self._encode(prompt) for prompt in ([prompts] if isinstance(prompts, str) else prompts)]

    def _encode(self, prompt: Prompt) -> Int32Array:
        if isinstance(prompt, str):
            return self._known(self.tokenizer.encode(prompt))
        try:
            ids = np.asarray(prompt)
        except ValueError:  # lists of different lengths
            ids = np.empty((), dtype=np.object_)
        if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
            raise InvalidRequest("prompt", _NO_PROMPT)
        return self._known(ids).astype(np.int32)

    def _known(self, ids: Int32Array) -> Int32Array:
        """Return the ids; InvalidRequest for one that the tokenizer has and the model has not."""
        check_vocabulary(ids, self._engine.limits)
        return ids

    def _params_for(
        self, prompts: list[Int32Array], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        """Return validated SamplingParams for each prompt, with max_tokens resolved."""
        self._require_open()
        if self._pooling is not None:
            raise InvalidRequest("model", NO_TEXT)
        if params is None or isinstance(params, SamplingParams):
            params = [params or self._default_params] * len(prompts)
        if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
            raise TypeError("sampling_params must be SamplingParams, or a list with one for each prompt")
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(params)} sampling parameters")
        return resolve_params(params, prompts, self._engine.limits, self.tokenizer, self._validator)

    def _run(
        self, prompts: list[Int32Array], params: list[SamplingParams], use_tqdm: bool, *, continues: bool
    ) -> list[OutputCollector]:
        """Return the prompts' answers; no other call runs meanwhile. `continues`: their texts continue the prompts'."""
        with self._lock, self._interrupts.delayed():
            self._require_open()
            self._ranks.check()
            self._come_to_rest()  # a second Ctrl-C may have interrupted it after the first
            self._num_seqs = len(prompts)
            try:
                with self._ranks.guard():
                    return self._answer(prompts, params, use_tqdm, continues=continues)
            except RankLost:
                raise
            except BaseException:
                with suppress(Exception):
                    self._come_to_rest()
                raise

    def _require_open(self) -> None:
        if os.getpid() != self._pid:  # the engine's threads were not forked: a call would wait for ever
            raise RuntimeError("this LLM was made by another process: make one in each process, or start it by spawn")
        if not self._end.alive:
            raise RuntimeError("this LLM is closed")

    def _come_to_rest(self) -> None:
        """Abort the sequences of an interrupted call. RuntimeError if its steps cannot be completed any more."""
        scheduler = self.loop.scheduler
        if not scheduler.is_broken:
            for seq_id in range(self._num_seqs):
                scheduler.end(seq_id, "abort")
            for _ in range(_STEPS_TO_REST):
                if self.loop.has_work:
                    self.loop.step()
        if scheduler.is_broken or self.loop.has_work:
            raise RuntimeError("an earlier call was interrupted in the middle of a step: close this LLM, make another")
        self._num_seqs = 0

    def _answer(
        self, prompts: list[Int32Array], params: list[SamplingParams], use_tqdm: bool, *, continues: bool
    ) -> list[OutputCollector]:
        scheduler, detokenizer = self.loop.scheduler, Detokenizer(self._decoder)
        for seq_id, (ids, one) in enumerate(zip(prompts, params, strict=True)):
            seed = choice_seed(random_seed() if one.seed is None else one.seed, 0)
            scheduler.add(seq_id, ids, one, seed, text=TextOptions(one.stop, continues=continues))

        answers = [OutputCollector(one) for one in params]
        with progress_bar("Generating", len(prompts), unit="request", leave=True, shown=use_tqdm) as bar:
            while self.loop.has_work:
                output = self.loop.step()
                self._interrupts.check()
                self._ranks.check()
                if not output:
                    continue
                deltas, stopped = detokenizer.apply(output)
                for delta in deltas:
                    answers[delta.seq_id].take(delta)
                    bar.update(delta.finish is not None)
                for message in stopped:
                    scheduler.end(message.seq_id, "stop")
        return answers


@contextmanager
def _phase(phases: dict[str, float], text: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    phases[text] = time.perf_counter() - begin


def _progress(calling: threading.Lock, counts: StepCounts, device: torch.device) -> Progress:
    """Return the progress of rank 0 for hang detection. Between calls no step is awaited."""
    if not calling.locked():
        return Progress(counts.begun, counts.begun)
    return counts.progress(device.type == "cpu")


def _end(pid: int, calling: threading.Lock, ranks: RankProcesses, held: ExitStack) -> None:
    """Close what an LLM holds that was not closed. A process that is forked from `pid` leaves it alone.

    A daemon thread may be in a call when the interpreter exits. Without the other ranks that call fails at once.
    """
    if os.getpid() != pid:
        return
    if calling.locked():
        ranks.kill()
    if calling.acquire(timeout=_GRACE):
        held.close()


def _conversations(messages: Any) -> list[list[ConversationMessage]]:
    """Return the conversations: one, or several; InvalidRequest for anything else."""
    several = isinstance(messages, Sequence) and all(isinstance(one, list | tuple) for one in messages)
    conversations = list(messages) if several and messages else [messages]
    for one in conversations:
        if not isinstance(one, list | tuple) or not all(isinstance(message, dict) for message in one):
            raise InvalidRequest("messages", "messages must be a list of messages, which are dicts, or of such lists")
    return [list(one) for one in conversations]


def _stacked(rows: list[Float32Array], width: int) -> Float32Array:
    """Return the rows as one array [n, width]; n may be 0."""
    return np.stack(rows) if rows else np.empty((0, width), dtype=np.float32)

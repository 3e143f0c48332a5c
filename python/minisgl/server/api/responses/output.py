"""Output items of a response as an answer makes them, and the stream event of each change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast

import msgspec
from msgspec import UNSET, UnsetType

from minisgl.parsers.streaming import CallArguments, CallStart, Content, Event, Reasoning
from minisgl.server.api.answers.large_json import JsonList
from minisgl.server.api.answers.logprob_forms import ChatLogprob
from minisgl.server.api.responses.items import seal
from minisgl.server.api.responses.tools import NamespacedName

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    logprobs: list[ChatLogprob] = []
    annotations: list[dict[str, Any]] = []


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


Part: TypeAlias = OutputText | ReasoningText


class MessageItem(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class ReasoningItem(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    content: list[ReasoningText]
    summary: list[dict[str, Any]] = []
    encrypted_content: str | None = None


class FunctionCallItem(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


OutputItem: TypeAlias = MessageItem | ReasoningItem | FunctionCallItem


class OutputItemAdded(msgspec.Struct, frozen=True, tag_field="type", tag="response.output_item.added"):
    sequence_number: int
    output_index: int
    item: OutputItem


class OutputItemDone(msgspec.Struct, frozen=True, tag_field="type", tag="response.output_item.done"):
    sequence_number: int
    output_index: int
    item: OutputItem


class _ItemEvent(msgspec.Struct, frozen=True, tag_field="type"):
    sequence_number: int
    output_index: int
    item_id: str


class ContentPartAdded(_ItemEvent, frozen=True, kw_only=True, tag="response.content_part.added"):
    part: Part
    content_index: int = 0


class ContentPartDone(_ItemEvent, frozen=True, kw_only=True, tag="response.content_part.done"):
    part: Part
    content_index: int = 0


class OutputTextDelta(_ItemEvent, frozen=True, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[ChatLogprob] = []
    content_index: int = 0


class OutputTextDone(_ItemEvent, frozen=True, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[ChatLogprob] = []
    content_index: int = 0


class ReasoningTextDelta(_ItemEvent, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str
    content_index: int = 0


class ReasoningTextDone(_ItemEvent, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    text: str
    content_index: int = 0


class ArgumentsDelta(_ItemEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_ItemEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


ItemEvent: TypeAlias = (
    OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | ArgumentsDelta
    | ArgumentsDone
)
PREFIXES: dict[type[Event], str] = {Content: "msg", Reasoning: "rs", CallStart: "fc"}


@dataclass(slots=True)
class _OpenItem:
    """Item that is being written. `start` is its first event, which has the name of a call."""

    id: str
    index: int
    start: Event
    texts: list[str] = field(default_factory=list)
    encoded_logprobs: JsonList = field(default_factory=JsonList)  # the last four events of a text repeat all of them

    @property
    def logprobs(self) -> list[ChatLogprob]:
        return cast(list[ChatLogprob], self.encoded_logprobs)

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Output:
    """Items of one response: takes an answer's events in order, and yields the stream's events.

    An item ends where an item of another kind, or another call, begins. Its id is made of its response's number and its
    index, so that the store can find it by its id.
    """

    def __init__(
        self,
        number: str,
        next_sequence_number: Callable[[], int],
        namespaced: Mapping[str, NamespacedName],
        *,
        seals_reasoning: bool,
    ) -> None:
        """`number`: the part of the response's id that its items' ids share; `namespaced`: functions by shown name."""
        self._number = number
        self._next = next_sequence_number
        self._namespaced = namespaced
        self._seals_reasoning = seals_reasoning
        self._done: list[OutputItem] = []
        self._open: _OpenItem | None = None

    def items(self) -> list[OutputItem]:
        """Return all items; one that is still being written is incomplete. Any thread may ask."""
        item = self._open  # read before `_done`: an item that ends meanwhile is in both
        done = self._done.copy()
        return done if item is None or item.index < len(done) else [*done, self._item(item, "incomplete")]

    def take(self, event: Event, logprobs: list[ChatLogprob]) -> Iterator[ItemEvent]:
        """Yield the stream's events for an event of the answer; `logprobs` are those of its tokens, if requested."""
        if isinstance(event, CallStart) or self._open is None or not _goes_on(self._open.start, event):
            yield from self.end("completed")
            yield from self._begin(event)
        item = self._open
        if item is None or isinstance(event, CallStart):
            return
        item.texts.append(event.text)
        item.encoded_logprobs.add(logprobs)
        match event:
            case Content(text):
                yield OutputTextDelta(self._next(), item.index, item.id, delta=text, logprobs=logprobs)
            case Reasoning(text):
                yield ReasoningTextDelta(self._next(), item.index, item.id, delta=text)
            case CallArguments(_, text):
                yield ArgumentsDelta(self._next(), item.index, item.id, delta=text)

    def finish(self, status: ItemStatus) -> Iterator[ItemEvent]:
        """End the answer. A complete one that has neither message nor call gets an empty message."""
        if status == "completed" and not any(not isinstance(item, ReasoningItem) for item in self.items()):
            yield from self.take(Content(""), [])
        yield from self.end(status)

    def end(self, status: ItemStatus) -> Iterator[ItemEvent]:
        """End the item that is being written, if any."""
        item = self._open
        if item is None:
            return
        done, text = self._item(item, status), item.text
        self._done.append(done)
        self._open = None
        match done:
            case FunctionCallItem(name=name):
                yield ArgumentsDone(self._next(), item.index, item.id, name=name, arguments=text)
            case ReasoningItem():
                yield ReasoningTextDone(self._next(), item.index, item.id, text=text)
                yield ContentPartDone(self._next(), item.index, item.id, part=ReasoningText(text))
            case MessageItem():
                yield OutputTextDone(self._next(), item.index, item.id, text=text, logprobs=item.logprobs)
                yield ContentPartDone(self._next(), item.index, item.id, part=OutputText(text, item.logprobs))
        yield OutputItemDone(self._next(), item.index, done)

    def _begin(self, event: Event) -> Iterator[ItemEvent]:
        index = len(self._done)
        item = self._open = _OpenItem(f"{PREFIXES[type(event)]}_{self._number}_{index}", index, event)
        yield OutputItemAdded(self._next(), index, self._item(item, "in_progress"))
        part: Part | None = None
        match event:
            case Content():
                part = OutputText("")
            case Reasoning():
                part = ReasoningText("")
        if part is not None:
            yield ContentPartAdded(self._next(), index, item.id, part=part)

    def _item(self, item: _OpenItem, status: ItemStatus) -> OutputItem:
        begun = status != "in_progress"  # until then an item has no content
        text = item.text
        match item.start:
            case CallStart(_, call_id, name):
                namespace, own_name = self._namespaced.get(name, (UNSET, name))
                return FunctionCallItem(item.id, status, call_id, own_name, text, namespace)
            case Reasoning():
                sealed = seal(text) if self._seals_reasoning and begun else None
                return ReasoningItem(item.id, status, [ReasoningText(text)] if begun else [], encrypted_content=sealed)
            case _:
                return MessageItem(item.id, status, [OutputText(text, item.logprobs)] if begun else [])


def _goes_on(start: Event, event: Event) -> bool:
    """Return True if an event belongs to the item that began with `start`."""
    if isinstance(start, CallStart):
        return isinstance(event, CallArguments)
    return type(start) is type(event)

"""Stored responses as requests use them; without a store, errors that name its flag."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from minisgl.sampling_params import InvalidRequest
from minisgl.server.api.answers.large_json import encode_large
from minisgl.server.api.http.errors import ApiError
from minisgl.server.api.responses.body import Item, ResponsesBody
from minisgl.server.api.responses.items import REFERENCE, kept_items
from minisgl.server.api.responses.store import Entry, Hold, MissingResponse, ResponseStore, TooMuchStored
from minisgl.server.api.responses.writer import PREFIX, Keep, Response
from minisgl.tokenizer.conversation import member

T = TypeVar("T")
FLAG = "--response-store FILE"
NOT_STORED = "store: the response could not be stored"
TOO_LARGE = "store: the response is larger than all that the server may store (--response-store-bytes)"


class ItemList(msgspec.Struct, frozen=True, tag_field="object", tag="list"):
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class History:
    """Responses of one owner, as one request uses them. `store` is None if the server stores none."""

    def __init__(self, store: ResponseStore | None, owner: str, hold: Hold) -> None:
        self._store = store
        self.owner = owner
        self._hold = hold

    # For a new response.

    async def before(self, body: ResponsesBody) -> list[Item]:
        """Return the items of the conversation that a body continues, if any; InvalidRequest if it is not stored."""
        id = body.previous_response_id
        if id is None:
            return []
        if self._store is None:
            raise InvalidRequest(
                "previous_response_id", f"previous_response_id: the server keeps responses only with {FLAG}"
            )
        try:
            return await self._store.conversation(id, self.owner, self._hold)
        except MissingResponse as error:
            text = f"previous_response_id: there is no response {error.id:.80}"
            raise InvalidRequest("previous_response_id", text, "previous_response_not_found") from None
        except TooMuchStored:
            raise InvalidRequest(
                "previous_response_id", "previous_response_id: the conversation has become too long"
            ) from None

    async def resolved(self, items: Sequence[Item]) -> list[Item]:
        """Return the items with references replaced by the stored items; InvalidRequest for one that is not stored."""
        wanted = {
            index: member(item, "id", str, f"input.{index}") for index, item in enumerate(items) if _is_reference(item)
        }
        if not wanted:
            return list(items)
        if self._store is None:
            path = f"input.{next(iter(wanted))}"
            text = f"{path}: the server can look items up only with {FLAG}; clients that set store to false send them"
            raise InvalidRequest(path, text)
        try:
            found = await self._store.find(wanted.values(), self.owner, self._hold)
        except TooMuchStored:
            raise InvalidRequest("input", "input: the items referred to, or their responses, are too long") from None
        for index, id in wanted.items():
            if id not in found:
                raise InvalidRequest(f"input.{index}.id", f"input.{index}.id: there is no item {id:.80}")
        return [found[wanted[index]] if index in wanted else item for index, item in enumerate(items)]

    def keeper(self, body: ResponsesBody, items: Sequence[Item]) -> Keep | None:
        """Return the function that stores the response to these items; None if it is not to be stored.

        The client gets its response even if it cannot be stored, but then with `store` false and a warning.
        """
        store = self._store
        if store is None or not body.store:
            return None

        async def keep(response: Response) -> Response:
            kept = msgspec.json.encode(kept_items(items, response.id.removeprefix(PREFIX)))
            previous = response.previous_response_id
            data = await asyncio.to_thread(encode_large, response)  # its log-probabilities may be many
            entry = Entry(response.id, self.owner, previous, kept, data)
            try:
                if await store.put(entry):
                    return response
                return _not_stored(response, TOO_LARGE)
            except ApiError:  # it could not be stored
                return _not_stored(response, NOT_STORED)

        return keep

    # For a stored response.

    async def response(self, id: str) -> bytes:
        """Return a response as JSON; ApiError if it is not stored."""
        return (await self._found(id, lambda store: store.get(id, self.owner, self._hold))).response

    async def delete(self, id: str) -> None:
        """Delete a response; ApiError if it is not stored."""
        await self._found(id, lambda store: store.delete(id, self.owner))

    async def input_items(self, id: str, *, limit: int, after: str | None, descending: bool) -> ItemList:
        """Return a page of a response's input items; an error if it, or the item `after`, is not stored."""
        items = await self._found(id, lambda store: store.input(id, self.owner, self._hold))
        if descending:
            items.reverse()
        start = 0
        if after is not None:
            start = next((index for index, item in enumerate(items, start=1) if item["id"] == after), 0)
            if not start:
                raise InvalidRequest("after", f"after: the response has no item {after:.80}")
        page = items[start : start + limit]
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        return ItemList(page, first, last, has_more=start + limit < len(items))

    async def _found(self, id: str, ask: Callable[[ResponseStore], Awaitable[T]]) -> T:
        """Return `ask(store)`; ApiError if the response is not stored, or its conversation too long."""
        if self._store is None:
            text = f"there is no response {id:.80}: the server keeps responses only with {FLAG}"
            raise ApiError(404, text, code="response_not_found")
        try:
            return await ask(self._store)
        except MissingResponse as error:
            raise ApiError(404, f"there is no response {error.id:.80}", code="response_not_found") from None
        except TooMuchStored:
            raise ApiError(400, f"the conversation of the response {id:.80} has become too long") from None


def _not_stored(response: Response, warning: str) -> Response:
    return msgspec.structs.replace(response, store=False, warnings=[*(response.warnings or []), warning])


def _is_reference(item: Item) -> bool:
    return item.get("type") == REFERENCE or (item.keys() <= {"id", "type"} and "id" in item and not item.get("type"))

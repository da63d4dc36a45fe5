"""The pages of a list: the next one is on its way while one is read, and their size follows the
objects.

A list of one request would be one text of hundreds of MiB. Each page costs the API server some
15 ms beside its objects (measured: 150,000 pods take 9.6 s in pages of 500, and 6.1 s in pages of
2,000), so pages of small objects have more of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from kube.client import AnswerTooLong, Client
from kube.deep_json import decode_deep

_FIRST: Final = 500
"""Objects of the first page, as client-go."""
_WANTED_BYTES: Final = 8 << 20
"""Of a page. Chosen: half of the answer that `kube.kept_client` takes; two are held at one time."""
_WANTED_S: Final = 3.0
"""For a page. Chosen: a tenth of the time that a client gives a request."""
_MOST: Final = 5000
"""Objects of a page. Chosen: more gain less than a hundredth of the time."""
_GROWTH: Final = 4
"""How many times the objects of one page the next one has at most: those after it may be larger."""


@dataclass(frozen=True, slots=True)
class Page:
    """Objects as JSON. version: the resourceVersion of the list, equal on all its pages."""

    items: list[msgspec.Raw]
    version: str


class _ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(name="continue", default="")


class _RawList(msgspec.Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None


@dataclass(frozen=True, slots=True)
class _Answer:
    """size: objects that were asked for. took: seconds."""

    body: bytes
    size: int
    took: float


async def pages(
    client: Client, path: str, selectors: Mapping[str, str]
) -> AsyncGenerator[Page, None]:
    """Yield the pages of a list, all of one moment, at least one.

    Raises ApiError, with status 410 if reading took so long that the server has forgotten that
    moment; Unreachable, and msgspec.DecodeError.
    """
    coming = asyncio.create_task(_page(client, path, selectors, "", _FIRST))
    try:
        while True:
            answer = await coming
            listed = decode_deep(answer.body, _RawList)
            items, token = listed.items or [], listed.metadata.continue_
            if token:
                size = _next_size(answer, len(items))
                coming = asyncio.create_task(_page(client, path, selectors, token, size))
                # The request goes out before this page is read.
                await asyncio.sleep(0)
            yield Page(items, listed.metadata.resource_version)
            if not token:
                return
    finally:
        coming.cancel()


async def _page(
    client: Client, path: str, selectors: Mapping[str, str], token: str, size: int
) -> _Answer:
    """Return a page. token: where the page before it ended, or ""."""
    while True:
        params = {**selectors, "limit": str(size)}
        if token:
            params["continue"] = token
        began = time.monotonic()
        try:
            body = await client.request("GET", path, params=params)
        except AnswerTooLong:
            if size == 1:
                raise
            size //= 2
            continue
        return _Answer(body, size, time.monotonic() - began)


def _next_size(answer: _Answer, count: int) -> int:
    """Return how many objects to ask for, after a page with `count` of them."""
    by_bytes = _WANTED_BYTES * max(count, 1) // len(answer.body)
    by_time = int(answer.size * _WANTED_S / max(answer.took, 1e-3))
    return max(1, min(by_bytes, by_time, _MOST, _GROWTH * answer.size))

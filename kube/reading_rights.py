"""Which of the collections that caches need an API server does not let a client read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

import msgspec

from kube.cache import Collection
from kube.client import ApiError, Client, Unreachable

_WATCH_S: Final = 5.0
"""For the beginning of a watch, and the watch's own end. Chosen: it is left when it has begun."""


class _Meta(msgspec.Struct, rename="camel"):
    resource_version: str = ""


class _List(msgspec.Struct):
    metadata: _Meta


async def forbidden(client: Client, collections: Iterable[Collection]) -> tuple[str, ...]:
    """Return what the API server says about each collection that may not be listed or watched.

    Each is asked for once, one object of it. Other failures do not count: a type may not be
    installed, and a server that does not answer says nothing about rights.
    """
    answers = await asyncio.gather(*(_refusal(client, each) for each in collections))
    return tuple(answer for answer in answers if answer)


async def _refusal(client: Client, collection: Collection) -> str:
    """Return why a collection may not be read, "" if it may or if that cannot be found out."""
    path, selectors = collection.path, collection.selectors
    try:
        params = {**selectors, "limit": "1"}
        answer = await client.request("GET", path, params=params, tries=1)
        version = msgspec.json.decode(answer, type=_List).metadata.resource_version
        params = {
            **selectors,
            "watch": "1",
            "resourceVersion": version,
            "timeoutSeconds": str(round(_WATCH_S)),
        }
        async with client.stream(path, params=params, silence_seconds=_WATCH_S):
            return ""
    except ApiError as error:
        return str(error) if error.forbidden else ""
    except (Unreachable, msgspec.DecodeError):
        return ""

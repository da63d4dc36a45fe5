"""One object of this node in the API server, of which koordlet writes a part.

The last answer of the server is kept, so that a report costs one request: a merge patch with what
differs, bound to the version that it was computed from. If another writer was faster, the server
refuses the patch; the object is then read and the patch computed again. So nothing that another
writer has changed is overwritten by an outdated value, and a changed spec is seen at once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, Final

import msgspec

from kube.client import ApiError, Client, encode_object
from kube.patches import merge_patch
from kube.resources import Resource

Plain = dict[str, Any]

Change = Callable[[Plain | None], Plain | None]
"""From the object as stored (None: there is none) to the object as wanted.

None: it shall stay as it is, or stay absent. The stored object must not be changed."""

_TRIES: Final = 5
_PAUSE_S: Final = 0.01
"""After a conflict; client-go's tries and first pause, which becomes five times longer."""

_decode: Final = msgspec.json.Decoder(Plain).decode


class StoredObject:
    """The object of that name. One task uses it."""

    def __init__(self, resource: Resource, name: str, *, subresource: str = "") -> None:
        self.resource = resource
        self.name = name
        self.writes = 0
        """How many patches and creations the server took."""
        self._subresource = subresource
        self._stored: Plain | None = None
        self._known = False

    def look_again(self) -> None:
        """Read the object before the next write."""
        self._known = False

    async def read(self, client: Client) -> Plain | None:
        """Return the object as last seen, read now unless it is known. Raises as `Client` does."""
        if not self._known:
            self._stored = await client.find(self.resource, self.name, _decode)
            self._known = True
        return self._stored

    async def write(self, client: Client, change: Change) -> bool:
        """Make the object what `change` wants; return whether a write was needed.

        Raises ApiError and Unreachable.
        """
        pause = _PAUSE_S
        for attempt in range(1, _TRIES + 1):
            stored = await self.read(client)
            wanted = change(stored)
            if wanted is None:
                return False
            try:
                if stored is None:
                    self._stored = _decode(
                        await client.create(self.resource, encode_object(self.resource, wanted))
                    )
                    self.writes += 1
                    return True
                patch = merge_patch(stored, wanted)
                if not patch:
                    return False
                version = stored.get("metadata", {}).get("resourceVersion")
                if version:
                    patch["metadata"] = {**patch.get("metadata", {}), "resourceVersion": version}
                self._stored = _decode(
                    await client.patch(
                        self.resource,
                        self.name,
                        msgspec.json.encode(patch),
                        subresource=self._subresource,
                    )
                )
                self.writes += 1
                return True
            except ApiError as error:
                self._known = False
                outdated = error.conflict or error.already_exists or error.not_found
                if not outdated or attempt == _TRIES:
                    raise
            await asyncio.sleep(pause * random.uniform(0.9, 1.1))
            pause *= 5
        raise AssertionError("unreachable")

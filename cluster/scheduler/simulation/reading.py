"""Objects of a running cluster, read with GET requests alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from cluster.scheduler.simulation.objects import FileObject, Progress
from kube.cache import Collection
from kube.client import ApiError, Client
from kube.resources import NODES, PODS

_PAGE: Final = 500
"""Objects of one request, as client-go."""
_NEEDED: Final = (NODES, PODS)


class _ListMeta(msgspec.Struct):
    continue_: str = msgspec.field(name="continue", default="")


class _Page(msgspec.Struct):
    metadata: _ListMeta = msgspec.field(default_factory=_ListMeta)
    items: list[msgspec.Raw] | None = None


class _Meta(msgspec.Struct):
    name: str
    namespace: str = ""


class _Head(msgspec.Struct):
    metadata: _Meta


async def read_cluster(
    client: Client, collections: Iterable[Collection], *, progress: Progress
) -> tuple[list[FileObject], tuple[str, ...]]:
    """Return all objects of these collections, and what could not be read and counts as absent.

    Nodes and pods are needed. Raises ApiError or Unreachable.
    """
    objects: list[FileObject] = []
    notes: list[str] = []
    for collection in collections:
        resource = collection.resource
        progress(f"reading {resource.plural}")
        try:
            found = await _objects_of(client, collection)
        except ApiError as error:
            if resource in _NEEDED or error.status not in (403, 404):
                raise
            if error.status == 403:
                notes.append(f"{resource.plural} may not be read, and count as absent: {error}")
            continue
        objects += found
    return objects, tuple(notes)


async def _objects_of(client: Client, collection: Collection) -> list[FileObject]:
    resource = collection.resource
    objects: list[FileObject] = []
    token = ""
    while True:
        params = {**collection.selectors, "limit": str(_PAGE)}
        if token:
            params["continue"] = token
        page = msgspec.json.decode(
            await client.request("GET", collection.path, params=params), type=_Page
        )
        for item in page.items or ():
            meta = msgspec.json.decode(item, type=_Head).metadata
            objects.append(
                FileObject(
                    resource.group,
                    resource.kind,
                    meta.namespace,
                    meta.name,
                    bytes(item),
                    "the cluster",
                )
            )
        token = page.metadata.continue_
        if not token:
            return objects

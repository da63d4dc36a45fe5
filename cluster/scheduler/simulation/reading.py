"""Objects of a running cluster, read with GET requests alone."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import aclosing
from typing import Final

import msgspec

from cluster.scheduler.simulation.objects import FileObject, Progress
from kube.cache import Collection
from kube.client import ApiError, Client
from kube.pages import pages
from kube.resources import NODES, PODS

_NEEDED: Final = (NODES, PODS)


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
    async with aclosing(pages(client, collection.path, collection.selectors)) as listed:
        async for page in listed:
            for item in page.items:
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
    return objects

"""What is read of a running cluster."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from aiohttp import web

from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.simulation.reading import read_cluster
from cluster.scheduler.simulation.simulation import collections_read
from kube.cache import Collection
from kube.client import ApiError
from kube.resources import NODES, PODS, STORAGE_CLASSES, Resource
from tests.cluster.scheduler.simulation.dumps import KOORDINATOR
from tests.kube.scripted import answer, api, listing, status


def test_of_config_maps_the_templates_alone_are_read() -> None:
    asked: Counter[str] = Counter()
    selectors: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        asked[request.path] += 1
        if "configmaps" in request.path:
            selectors.append(request.query.get("fieldSelector", ""))
            # Two pages.
            return listing(1, more="" if "continue" in request.query else "rest")
        return listing(1)

    async def read() -> None:
        collections = collections_read((read_configuration(KOORDINATOR, obj="test"),))
        async with api(handler) as client:
            _, notes = await read_cluster(client, collections, progress=lambda text: None)
        assert notes == ()

    asyncio.run(read())
    assert selectors == ["metadata.name=gpu-shared-resource-templates"] * 2
    of_config_maps = [path for path in asked if "configmaps" in path]
    assert of_config_maps == ["/api/v1/namespaces/koordinator-system/configmaps"]
    assert asked["/api/v1/pods"] == asked["/apis/scheduling.k8s.io/v1/priorityclasses"] == 1


async def _read(
    refused: Resource, code: int
) -> tuple[list[tuple[str, str, str, str]], tuple[str, ...], list[str]]:
    """Return what is read of a cluster that refuses one kind: objects, notes and progress."""

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path == refused.path():
            return status(code, "Refused", "not yours")
        named = {"name": "x", "namespace": "ns"} if request.path == PODS.path() else {"name": "x"}
        return answer({"metadata": {"resourceVersion": "1"}, "items": [{"metadata": named}]})

    shown: list[str] = []
    collections = [Collection(each, each.path()) for each in (STORAGE_CLASSES, NODES, PODS)]
    async with api(handler) as client:
        objects, notes = await read_cluster(client, collections, progress=shown.append)
    assert {each.where for each in objects} <= {"the cluster"}
    return [(each.group, each.kind, each.key, each.raw.decode()) for each in objects], notes, shown


@pytest.mark.parametrize(("code", "noted"), [(403, True), (404, False)])
def test_a_kind_that_may_not_be_read_or_is_unknown_counts_as_absent(code: int, noted: bool) -> None:
    objects, notes, shown = asyncio.run(_read(STORAGE_CLASSES, code))
    assert objects == [
        ("", "Node", "x", '{"metadata":{"name":"x"}}'),
        ("", "Pod", "ns/x", '{"metadata":{"name":"x","namespace":"ns"}}'),
    ]
    assert shown == ["reading storageclasses", "reading nodes", "reading pods"]
    absent = "storageclasses may not be read, and count as absent"
    assert [note.partition(":")[0] for note in notes] == ([absent] if noted else [])


@pytest.mark.parametrize(
    ("refused", "code"), [(NODES, 403), (NODES, 404), (PODS, 403), (STORAGE_CLASSES, 422)]
)
def test_nodes_and_pods_are_needed_and_other_errors_end_the_reading(
    refused: Resource, code: int
) -> None:
    with pytest.raises(ApiError) as caught:
        asyncio.run(_read(refused, code))
    assert caught.value.status == code

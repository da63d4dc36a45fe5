"""What is read of a running cluster."""

from __future__ import annotations

import asyncio
from collections import Counter

from aiohttp import web

from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.simulation.reading import read_cluster
from cluster.scheduler.simulation.simulation import collections_read
from tests.cluster.scheduler.simulation.dumps import KOORDINATOR
from tests.kube.scripted import api, listing


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

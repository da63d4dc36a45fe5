"""Gangs on a real API server: gathered in the network, and cut in the middle."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from kube.client import Client, encode_object
from kube.resources import CLUSTER_NETWORK_TOPOLOGIES, POD_GROUPS
from tests.beds.apiserver import ApiServer, eventually
from tests.cluster.scheduler.beds.on_api_server import (
    make_node,
    make_pod,
    nodes_of,
    play,
    pods,
    refusal,
    scheduler,
)

pytestmark = pytest.mark.apiserver

_CONFIGURATION = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection: {leaderElect: false}
profiles:
- schedulerName: koord-scheduler
  plugins:
    preEnqueue: {enabled: [{name: Coscheduling}]}
    score: {enabled: [{name: Coscheduling, weight: 1}]}
    permit: {enabled: [{name: Coscheduling}]}
  pluginConfig:
  - name: Coscheduling
    args: {awareNetworkTopology: true}
"""
_SPEC = '{"gatherStrategy":[{"layer":"RackLayer","strategy":"MustGather"}]}'


async def _a_gang_is_gathered_in_one_rack(server: ApiServer, client: Client) -> None:
    for number in range(3):
        await make_node(client, f"a{number}", cpu=4, labels={"rack": "A"})
        await make_node(client, f"b{number}", cpu=4, labels={"rack": "B"})
    group = {
        "metadata": {
            "name": "g",
            "annotations": {"gang.scheduling.koordinator.sh/network-topology-spec": _SPEC},
        },
        "spec": {"minMember": 5},
    }
    await client.create(POD_GROUPS, encode_object(POD_GROUPS, group), namespace="default")
    member = {"labels": {"pod-group.scheduling.sigs.k8s.io": "g"}}
    async with scheduler(server.connection(), _CONFIGURATION, network_status=True) as process:
        # Two nodes of rack A are half full.
        await make_pod(client, "other-0", cpu="2", nodeSelector={"rack": "A"})
        await make_pod(client, "other-1", cpu="2", nodeSelector={"rack": "A"})
        for number in range(5):
            await make_pod(client, f"g{number}", cpu="2", metadata=member)

        async def without_topology() -> bool:
            return any("no cluster network topology" in refusal(pod) for pod in await pods(client))

        await eventually(without_topology)
        layers = [
            {
                "topologyLayer": "RackLayer",
                "parentTopologyLayer": "ClusterTopologyLayer",
                "labelKey": ["rack"],
            },
            {"topologyLayer": "NodeTopologyLayer", "parentTopologyLayer": "RackLayer"},
        ]
        topology = {"metadata": {"name": "default"}, "spec": {"networkTopologySpec": layers}}
        body = encode_object(CLUSTER_NETWORK_TOPOLOGIES, topology)
        await client.create(CLUSTER_NETWORK_TOPOLOGIES, body)

        async def all_bound() -> bool:
            return all((await nodes_of(client)).values())

        await eventually(all_bound, seconds=30)
        racks = Counter(
            node[0] for name, node in (await nodes_of(client)).items() if name.startswith("g")
        )
        # Rack A has headroom for four, rack B for six.
        assert racks == {"b": 5}
        assert process.network_status is not None
        # Without waiting for the ten seconds after which it is written.
        await process.network_status.write()
        raw = await client.request("GET", CLUSTER_NETWORK_TOPOLOGIES.path(name="default"))
        detail = msgspec.json.decode(raw)["status"]["detailStatus"]
        named = [(one["topologyInfo"]["topologyName"], one["nodeNum"]) for one in detail]
        assert named == [("", 6), ("A", 3), ("B", 3)]


def test_a_gang_is_gathered_in_one_rack(server: ApiServer) -> None:
    play(server, _a_gang_is_gathered_in_one_rack)

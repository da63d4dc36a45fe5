"""ClusterNetworkTopologies for tests."""

from __future__ import annotations

from apis.decode import decode_object
from apis.network_topology import ClusterNetworkTopology


def topology(*layers: tuple[str, str, list[str]]) -> ClusterNetworkTopology:
    """Return an object with these layers: name, parent, label keys."""
    spec = [{"topologyLayer": n, "parentTopologyLayer": p, "labelKey": k} for n, p, k in layers]
    plain = {"metadata": {"name": "default"}, "spec": {"networkTopologySpec": spec}}
    return decode_object(plain, ClusterNetworkTopology, obj="ClusterNetworkTopology default")


RACKS: tuple[tuple[str, str, list[str]], ...] = (
    ("SpineLayer", "ClusterTopologyLayer", ["spine"]),
    ("RackLayer", "SpineLayer", ["rack", "old-rack"]),
    ("NodeTopologyLayer", "RackLayer", []),
)

"""ClusterNetworkTopology: how the nodes of a cluster are connected."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from apis.core import ObjectMeta
from apis.decode import Wire
from apis.meta import REQUIRED, Int32


class NetworkTopologyLayer(Wire, frozen=True):
    """One layer of the network, such as spine or rack.

    topology_layer: Name of the layer. ClusterTopologyLayer and NodeTopologyLayer are built in.
    parent_topology_layer: Name of the layer above.
    label_key: Node labels that name the domain of this layer; the first that a node has counts.
    """

    topology_layer: str
    parent_topology_layer: str = ""
    label_key: tuple[str, ...] = ()


class ClusterNetworkTopologySpec(Wire, frozen=True):
    """The layers of the network.

    network_topology_spec: The layers.
    """

    network_topology_spec: Annotated[tuple[NetworkTopologyLayer, ...], Meta(extra=REQUIRED)] = ()


class TopologyInfo(Wire, frozen=True, omit_defaults=False):
    """A domain of the network.

    topology_layer: Name of its layer.
    topology_name: Name of the domain.
    """

    topology_layer: str
    topology_name: str


class NetworkTopologyDetail(Wire, frozen=True):
    """One domain and what is around it.

    topology_info: The domain.
    node_num: Number of nodes below it.
    parent_topology_info: The domain above.
    child_topology_layer: Name of the layer below.
    child_topology_names: Domains below, unless these are nodes.
    """

    topology_info: TopologyInfo
    node_num: Int32
    parent_topology_info: TopologyInfo | None = None
    child_topology_layer: str = ""
    child_topology_names: tuple[str, ...] = ()


class ClusterNetworkTopologyStatus(Wire, frozen=True):
    """The domains that were found.

    detail_status: The domains, each before those below it.
    """

    detail_status: tuple[NetworkTopologyDetail, ...] = ()


class ClusterNetworkTopology(Wire, frozen=True):
    """How the cluster's nodes are connected, layer by layer.

    spec: The layers of the network.
    status: The domains that were found.
    """

    metadata: ObjectMeta = ObjectMeta()
    spec: ClusterNetworkTopologySpec = ClusterNetworkTopologySpec()
    status: ClusterNetworkTopologyStatus = ClusterNetworkTopologyStatus()

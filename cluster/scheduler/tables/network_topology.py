"""The tree of the network: domains such as spines and racks, from the labels of nodes.

A ClusterNetworkTopology names layers, each below its parent, from ClusterTopologyLayer, which is
the whole cluster, down to NodeTopologyLayer, the nodes. A node's domain of a layer is the value of
the first of the layer's labels that it has. A node without a domain of the layer right above the
nodes gets one of its own, named after it; a node that lacks another layer is not in the tree.
Source: Koordinator; docs/facts/scheduler.md, "Network topology".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from apis.errors import InputError
from apis.network_topology import ClusterNetworkTopology, NetworkTopologyDetail, TopologyInfo
from cluster.scheduler.tables.nodes import NodeTable

CLUSTER: Final = "ClusterTopologyLayer"
NODE: Final = "NodeTopologyLayer"
ROOT: Final = 0
"""Number of the domain that is the whole cluster."""
OUTSIDE: Final = -1
"""Stands for the domain of a node that is not in the tree."""
_FIELD: Final = "spec.networkTopologySpec"


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer between the cluster and the nodes.

    labels: keys; the first that a node has names its domain.
    """

    name: str
    labels: tuple[str, ...]


def layers_of(topology: ClusterNetworkTopology) -> tuple[Layer, ...]:
    """Return the layers from the widest to the one right above the nodes. Raises InputError."""
    obj = f"ClusterNetworkTopology {topology.metadata.name}"

    def bad(value: object, problem: str) -> InputError:
        return InputError(obj=obj, field=_FIELD, value=value, problem=problem)

    given = {layer.topology_layer: layer for layer in topology.spec.network_topology_spec}
    if len(given) < len(topology.spec.network_topology_spec):
        names = [layer.topology_layer for layer in topology.spec.network_topology_spec]
        twice = next(name for name in names if names.count(name) > 1)
        raise bad(twice, "is given twice")
    if NODE not in given:
        raise bad(sorted(given), f"expected a layer {NODE}")
    layers: list[Layer] = []
    above = given[NODE].parent_topology_layer
    while above and above != CLUSTER:
        layer = given.get(above)
        if layer is None:
            raise bad(above, "is the parent of a layer and no layer itself")
        if any(known.name == above for known in layers):
            raise bad(above, "is above itself")
        if not layer.label_key:
            raise bad(above, "expected a labelKey")
        layers.append(Layer(above, layer.label_key))
        above = layer.parent_topology_layer
    if above != CLUSTER:
        highest = layers[-1].name if layers else NODE
        raise bad(highest, f"expected the parent {CLUSTER}, or a layer below it")
    unused = given.keys() - {layer.name for layer in layers} - {NODE, CLUSTER}
    if unused:
        raise bad(min(unused), f"is not above {NODE}")
    return tuple(reversed(layers))


@dataclass(frozen=True, slots=True)
class Domain:
    """A part of the cluster.

    depth: 0 is the cluster. parent: number of the domain around it; for the cluster its own.
    """

    name: str
    depth: int
    parent: int


@dataclass(frozen=True, slots=True, eq=False)
class NetworkTree:
    """layers: names by depth, the cluster first, without the nodes. domains: by number; each comes
    after its parent. children: numbers, by name. domain_of: number of the lowest domain by row."""

    layers: tuple[str, ...]
    domains: tuple[Domain, ...]
    children: tuple[tuple[int, ...], ...]
    domain_of: NDArray[np.intp]

    def rows(self, domain: int) -> NDArray[np.intp]:
        """Return the nodes right below a domain of the lowest layer."""
        return np.flatnonzero(self.domain_of == domain)

    def above(self, domain: int) -> Iterator[int]:
        """Yield a domain and those above it, up to the cluster."""
        yield domain
        while domain != ROOT:
            domain = self.domains[domain].parent
            yield domain

    def sums(self, by_row: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sum of a column over the nodes below each domain."""
        inside = self.domain_of != OUTSIDE
        sums = np.zeros(len(self.domains), dtype=np.int64)
        np.add.at(sums, self.domain_of[inside], by_row[inside])
        for number in range(len(self.domains) - 1, ROOT, -1):
            sums[self.domains[number].parent] += sums[number]
        return sums


def tree_of(layers: tuple[Layer, ...], nodes: NodeTable) -> NetworkTree:
    """Return the tree of the nodes that are there now."""
    domains = [Domain("", 0, ROOT)]
    numbers: dict[tuple[int, str], int] = {}
    domain_of = np.full(len(nodes), OUTSIDE, dtype=np.intp)
    for row in np.flatnonzero(nodes.alive[: len(nodes)]).tolist():
        path = _path(layers, nodes, row)
        if path is None:
            continue
        at = ROOT
        for depth, name in enumerate(path, start=1):
            below = numbers.get((at, name))
            if below is None:
                below = numbers[at, name] = len(domains)
                domains.append(Domain(name, depth, at))
            at = below
        domain_of[row] = at
    children: list[list[int]] = [[] for _ in domains]
    for number, domain in enumerate(domains[1:], start=1):
        children[domain.parent].append(number)
    return NetworkTree(
        layers=(CLUSTER, *(layer.name for layer in layers)),
        domains=tuple(domains),
        children=tuple(tuple(sorted(each, key=lambda n: domains[n].name)) for each in children),
        domain_of=domain_of,
    )


def _path(layers: tuple[Layer, ...], nodes: NodeTable, row: int) -> tuple[str, ...] | None:
    """Return the names of a node's domains below the cluster; None if it is not in the tree."""
    labels = nodes.labels.of(row)
    path = []
    for layer in layers:
        name = next((labels[key] for key in layer.labels if labels.get(key)), "")
        if not name:
            if layer is not layers[-1]:
                return None
            name = nodes.name(row)
        path.append(name)
    return tuple(path)


def detail_of(tree: NetworkTree) -> tuple[NetworkTopologyDetail, ...]:
    """Return the domains for the status: each before those below it, siblings by name."""
    counts = tree.sums(np.ones(len(tree.domain_of), dtype=np.int64))
    details: list[NetworkTopologyDetail] = []
    open_domains = [ROOT]
    while open_domains:
        number = open_domains.pop()
        domain = tree.domains[number]
        children = tree.children[number]
        lowest = domain.depth == len(tree.layers) - 1
        details.append(
            NetworkTopologyDetail(
                topology_info=_info(tree, domain),
                node_num=int(counts[number]),
                parent_topology_info=(
                    None if number == ROOT else _info(tree, tree.domains[domain.parent])
                ),
                child_topology_layer=NODE if lowest else tree.layers[domain.depth + 1],
                child_topology_names=tuple(tree.domains[child].name for child in children),
            )
        )
        open_domains += reversed(children)
    return tuple(details)


def _info(tree: NetworkTree, domain: Domain) -> TopologyInfo:
    return TopologyInfo(topology_layer=tree.layers[domain.depth], topology_name=domain.name)


class NetworkTopology:
    """The layers of the cluster, and the tree of its nodes as they are now."""

    def __init__(self, nodes: NodeTable) -> None:
        self._nodes = nodes
        self._layers: tuple[Layer, ...] | None = None
        self._tree: NetworkTree | None = None
        self._membership = -1

    def set(self, layers: tuple[Layer, ...] | None) -> None:
        """Take other layers; None: no usable topology is known."""
        self._layers = layers
        self._membership = -1

    def tree(self) -> NetworkTree | None:
        """Return the tree, made again when nodes or their labels changed; None without layers."""
        if self._layers is None:
            return None
        if self._membership != self._nodes.membership:
            self._tree = tree_of(self._layers, self._nodes)
            self._membership = self._nodes.membership
        return self._tree

"""NetworkTopology: a pod goes close to the pods of the same job, by the layers of the network.

A job's pods carry the same value of the label that the annotation network-topology-selector names,
in one namespace. Nodes are sorted by the number of such pods on the node, then in its domain of the
lowest layer, and so on up to the cluster, more first; then by the number of feasible nodes in these
domains, fewer first; then by name. The first node scores 100, the last 0. Source: Koordinator;
docs/scheduler.md, "Network topology".
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.plugins.contract import Scores, to_largest_reversed, zeros
from cluster.scheduler.tables.gather import selected
from cluster.scheduler.tables.matching import Counter
from cluster.scheduler.tables.network_topology import OUTSIDE, NetworkTopology, NetworkTree
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables


def same_job(pod: PodShape, tables: Tables) -> Counter | None:
    """Return the counter of the pods of the same job, kept with the shape; None without a job."""
    label = selected(pod)
    if label is None:
        return None
    kept = pod.derived(_kept_counters)
    counter = kept.get(tables)
    if counter is None:
        key, value = label
        namespace = pod.namespace
        counter = kept[tables] = tables.matches.counter(
            ("network topology", namespace, key, value),
            lambda other: int(other.namespace == namespace and other.labels.get(key) == value),
        )
    return counter


def _kept_counters(pod: PodShape) -> WeakKeyDictionary[Tables, Counter]:
    return WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class NetworkTopologyScore:
    """network: the layers and the tree of the nodes."""

    network: NetworkTopology
    name: str = "Coscheduling"

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        return selected(pod) is not None

    def score_set(self, pod: PodShape, tables: Tables, feasible: NDArray[np.intp]) -> Scores:
        tree = self.network.tree()
        counter = same_job(pod, tables)
        if tree is None or counter is None or not len(feasible):
            return zeros(len(feasible))
        length = len(tables.nodes)
        on_nodes = counter.column(length)
        passes = zeros(length)
        passes[feasible] = 1
        keys = [-on_nodes[feasible]]
        by_layer = _by_layer(tree, feasible)
        existing, open_nodes = tree.sums(on_nodes), tree.sums(passes)
        keys += [-existing[domains] for domains in by_layer]
        keys += [open_nodes[domains] for domains in by_layer]
        names = np.array([tables.nodes.name(int(row)) for row in feasible])
        order = np.lexsort((names, *reversed(keys)))
        # A node that is not in the tree comes after all others.
        order = np.concatenate((order[~_outside(tree, feasible)[order]],
                                order[_outside(tree, feasible)[order]]))  # fmt: skip
        position = zeros(len(feasible))
        position[order] = np.arange(len(feasible))
        return to_largest_reversed(position)


def _outside(tree: NetworkTree, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
    return np.equal(tree.domain_of[rows], OUTSIDE)


def _by_layer(tree: NetworkTree, rows: NDArray[np.intp]) -> list[NDArray[np.intp]]:
    """Return the domain of each row, from the lowest layer up to the cluster.

    Rows outside of the tree count with the cluster.
    """
    parents = np.array([domain.parent for domain in tree.domains], dtype=np.intp)
    domains = np.where(_outside(tree, rows), 0, tree.domain_of[rows])
    result = [domains]
    for _ in tree.layers[1:]:
        domains = parents[domains]
        result.append(domains)
    return result

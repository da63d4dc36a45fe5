"""Which nodes a gang gets so that its pods are close to each other in the network.

The deepest layer is found at which one domain has headroom for all pods, below one domain of each
layer where the gang must be gathered. Its domains are candidates: those with more pods of the same
job first, then those with less headroom, which leaves wide domains to other gangs, then those with
higher scores. Within a candidate, the domains with the most headroom are filled first, so the pods
are spread over few. Source: Koordinator; docs/scheduler.md, "Network topology".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.tables.gather import Gather
from cluster.scheduler.tables.network_topology import NODE, ROOT, NetworkTree
from cluster.scheduler.tables.nodes import NodeTable

Column = NDArray[np.int64]

_MOST_NAMED: Final = 5
"""Domains that a message names. Chosen: a condition is read by people."""


@dataclass(frozen=True, slots=True)
class Offers:
    """What each node offers, by row.

    headroom: pods of the gang that it could take. existing: pods of the same job on it. scores: of
    the gang's first pod.
    """

    headroom: Column
    existing: Column
    scores: Column


class NotGathered(Exception):
    """No domain has room for the gang; the message says which come closest."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A domain, or a node (`row`) below the lowest layer."""

    domain: int
    row: int | None = None


class Choice(NamedTuple):
    """place: the domain, or the node, that takes the gang. nodes: (row, pods) in the order in which
    nodes are filled."""

    place: _Place
    nodes: list[tuple[int, int]]


def named_layers(tree: NetworkTree, gather: Gather) -> tuple[str, ...]:
    """Return the layers that a gang can name, the widest first.

    Raises NotGathered if the gang names a layer that the network does not have.
    """
    layers = (*tree.layers, NODE)
    for layer in (*gather.must, *gather.prefer, *dict(gather.multiples)):
        if layer not in layers:
            raise NotGathered(f"the cluster network topology has no layer {layer}")
    return layers


class Gathering:
    """The choice for one gang."""

    def __init__(
        self, tree: NetworkTree, nodes: NodeTable, gather: Gather, offers: Offers, pods: int
    ) -> None:
        """pods: how many have to be placed. Raises NotGathered for a layer that is not there."""
        self._tree = tree
        self._nodes = nodes
        self._pods = pods
        self._offers = offers
        self._multiples = dict(gather.multiples)
        layers = named_layers(tree, gather)
        self._lowest_must = max((layers.index(layer) for layer in gather.must), default=0)
        self._of_rows = offers.headroom - offers.headroom % self._multiple(NODE)
        self._of_domains = self._headroom_of_domains()
        self._existing = tree.sums(offers.existing)
        self._scores = tree.sums(np.where(self._of_rows > 0, offers.scores, 0))

    def _multiple(self, layer: str) -> int:
        """Return of what the pods in each domain of a layer have to be a multiple."""
        return self._multiples.get(layer, 1)

    def _headroom_of_domains(self) -> Column:
        """Return the headroom of each domain: the sum of those below, down to the multiple."""
        tree = self._tree
        sums = np.zeros(len(tree.domains), dtype=np.int64)
        inside = tree.domain_of >= 0
        np.add.at(sums, tree.domain_of[inside], self._of_rows[inside])
        for number in range(len(tree.domains) - 1, -1, -1):
            domain = tree.domains[number]
            sums[number] -= sums[number] % self._multiple(tree.layers[domain.depth])
            if number != ROOT:
                sums[domain.parent] += sums[number]
        return sums

    # --- one domain or node ----------------------------------------------------------------------

    def _headroom_at(self, place: _Place) -> int:
        return int(
            self._of_domains[place.domain] if place.row is None else self._of_rows[place.row]
        )

    def _children(self, place: _Place) -> list[_Place]:
        if place.row is not None:
            return []
        tree = self._tree
        if tree.domains[place.domain].depth == len(tree.layers) - 1:
            return [_Place(place.domain, int(row)) for row in tree.rows(place.domain)]
        return [_Place(child) for child in tree.children[place.domain]]

    def _name(self, place: _Place) -> str:
        if place.row is not None:
            return self._nodes.name(place.row)
        return self._tree.domains[place.domain].name

    def _order(self, place: _Place, *, widest: bool) -> tuple[object, ...]:
        """Return what sorts places, the best first; see the module's text."""
        above = tuple(self._tree.above(place.domain))
        existing = tuple(-int(self._existing[number]) for number in above)
        headroom = tuple(int(self._of_domains[number]) for number in above)
        score = int(self._scores[place.domain])
        if place.row is not None:
            existing = (-int(self._offers.existing[place.row]), *existing)
            headroom = (int(self._of_rows[place.row]), *headroom)
            score = int(self._offers.scores[place.row])
        if widest:
            headroom = tuple(-number for number in headroom)
        names = tuple(self._tree.domains[number].name for number in above)
        return existing, headroom, -score, (self._name(place), *names)

    # --- the choice ------------------------------------------------------------------------------

    def choose(self) -> list[tuple[int, int]]:
        """Return (row, pods) in the order in which nodes are filled. Raises NotGathered."""
        return self.choice().nodes

    def choice(self) -> Choice:
        """Return the domain and its nodes. Raises NotGathered."""
        for candidate in self._candidates():
            filled: list[tuple[int, int]] = []
            if self._fill(candidate, self._pods, filled) == self._pods:
                return Choice(candidate, filled)
        raise NotGathered(self._why_none())

    def rows_of(self, choice: Choice) -> list[int]:
        """Return all nodes with headroom in the domain of a choice, in the order of filling."""
        return list(self._rows_below(choice.place))

    def _rows_below(self, place: _Place) -> Iterator[int]:
        if place.row is not None:
            yield place.row
            return
        for child in self._widest_first(place):
            yield from self._rows_below(child)

    def _widest_first(self, place: _Place) -> list[_Place]:
        """Return the places right below with headroom, those with the most first."""
        with_headroom = [child for child in self._children(place) if self._headroom_at(child) > 0]
        return sorted(with_headroom, key=lambda child: self._order(child, widest=True))

    def _starts(self) -> list[_Place]:
        """Return the domains of the lowest layer at which the gang must be gathered."""
        lowest = len(self._tree.layers) - 1
        depth = min(self._lowest_must, lowest)
        domains = enumerate(self._tree.domains)
        starts = [_Place(number) for number, domain in domains if domain.depth == depth]
        if self._lowest_must > lowest:
            return [node for start in starts for node in self._children(start)]
        return starts

    def _candidates(self) -> list[_Place]:
        """Return the places of the deepest layer with headroom for all pods, the best first."""
        level = [place for place in self._starts() if self._headroom_at(place) >= self._pods]
        while True:
            below = [
                child
                for place in level
                for child in self._children(place)
                if self._headroom_at(child) >= self._pods
            ]
            if not below:
                return sorted(level, key=lambda place: self._order(place, widest=False))
            level = below

    def _fill(self, place: _Place, pods: int, filled: list[tuple[int, int]]) -> int:
        """Place up to `pods` pods below a place; return how many, down to its layer's multiple."""
        if place.row is not None:
            taken = min(pods, self._headroom_at(place))
            taken -= taken % self._multiple(NODE)
            if taken:
                filled.append((place.row, taken))
            return taken
        layer = self._tree.layers[self._tree.domains[place.domain].depth]
        most = min(pods, self._headroom_at(place))
        most -= most % self._multiple(layer)
        taken = 0
        begun = len(filled)
        for child in self._widest_first(place):
            if taken == most:
                break
            taken += self._fill(child, most - taken, filled)
        if taken % self._multiple(layer):
            del filled[begun:]
            return 0
        return taken

    def _why_none(self) -> str:
        depth = self._lowest_must
        layer = (*self._tree.layers, NODE)[depth]
        found = sorted(
            (
                (self._headroom_at(place), self._name(place) or "all nodes")
                for place in self._starts()
            ),
            key=lambda each: (-each[0], each[1]),
        )
        named = ", ".join(f"{name} {headroom}" for headroom, name in found[:_MOST_NAMED])
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        return (
            "no candidate topology nodes can accommodate job,"
            f" desiredOfferSlot: {self._pods}, {layer}: {named or 'none'}{more}"
        )

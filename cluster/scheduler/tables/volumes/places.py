"""Where volumes and storage can be reached: node selectors as numbers that arrays can hold.

A cluster with local disks has thousands of volumes, each reachable from one node. So a place is not
kept as a mask of all nodes. Places that ask for one value of one label (nearly all do) share a
layer, an array that holds for each row the number of the place that the row is in. A selector of
any other form has a layer of its own. What is known for each place becomes known for each row by
one look-up for each layer.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from apis.meta import LabelSelector
from apis.scheduling_pod import NodeSelectorRequirement, NodeSelectorTerm
from apis.storage import TopologySelectorTerm
from cluster.scheduler.tables.node_terms import node_term_holds
from cluster.scheduler.tables.nodes import NodeTable, Rows

Place = tuple[NodeSelectorTerm, ...] | None
"""One of the terms must hold; None is everywhere."""

Layer = NDArray[np.int64]
"""The number of a place by row, or NOWHERE."""

_FEW: Final = 8
"""Layers follow changed nodes row by row if at most one in so many changed, else they are made
again. Chosen: a row costs about as much as ten in one pass (1 us; measured)."""

NOWHERE: Final = -1
"""It is also the last index of any array: what is known by place ends with a value for it."""


class Places:
    """Numbers places. A number is in use as long as it is held as often as it was asked for."""

    def __init__(self, nodes: NodeTable) -> None:
        self._nodes = nodes
        self._numbers: dict[Place, int] = {}
        self._places: list[Place] = []
        self._holders: list[int] = []
        self._free: list[int] = []
        self._by_value: dict[str, dict[str, int]] = {}
        """Label key -> value -> number."""
        self._others: dict[int, Place] = {}
        self._key_layers: dict[str, Layer] = {}
        self._other_layers: dict[int, Layer] = {}
        self._version = -1
        """Of the Node objects that the layers show."""

    @property
    def size(self) -> int:
        """One more than the largest number ever given."""
        return len(self._places)

    def hold(self, place: Place) -> int:
        """Return the number of a place; it stays the same until it was released as often."""
        number = self._numbers.get(place)
        if number is None:
            number = self._new(place)
        self._holders[number] += 1
        return number

    def release(self, number: int) -> None:
        """Take one `hold` back."""
        self._holders[number] -= 1
        if self._holders[number]:
            return
        place = self._places[number]
        del self._numbers[place]
        self._free.append(number)
        if (label := _one_label(place)) is None:
            del self._others[number]
            self._other_layers.pop(number, None)
        else:
            key, value = label
            del self._by_value[key][value]
            if not self._by_value[key]:
                del self._by_value[key]
                self._key_layers.pop(key, None)
            elif (layer := self._key_layers.get(key)) is not None:
                self._key_layers[key] = np.where(layer == number, NOWHERE, layer)

    def layers(self) -> list[Layer]:
        """Return all layers; a row is in at most one place of each."""
        self._follow()
        return [
            *(self._key_layer(key) for key in self._by_value),
            *(self._other_layer(number) for number in self._others),
        ]

    def rows_in(self, number: int) -> NDArray[np.bool_]:
        """Return for each row whether it is in this place."""
        self._follow()
        label = _one_label(self._places[number])
        layer = self._other_layer(number) if label is None else self._key_layer(label[0])
        return np.equal(layer, number)

    def _new(self, place: Place) -> int:
        if self._free:
            number = self._free.pop()
            self._places[number] = place
        else:
            number = len(self._places)
            self._places.append(place)
            self._holders.append(0)
        self._numbers[place] = number
        if (label := _one_label(place)) is None:
            self._others[number] = place
        else:
            key, value = label
            self._by_value.setdefault(key, {})[value] = number
            if (layer := self._key_layers.get(key)) is not None:
                # Rows that changed since the layer was last read are written when it is read.
                column = self._nodes.labels.column(key)
                known = column.known(value)
                inside = (column.ids[: len(layer)] == known) & bool(known)
                self._key_layers[key] = np.where(inside, number, layer)
        return number

    def _follow(self) -> None:
        """Bring the layers up to date with the nodes. Arrays that were returned stay."""
        nodes = self._nodes
        if nodes.object_version == self._version:
            return
        changed = nodes.objects_changed_since(self._version)
        self._version = nodes.object_version
        if len(changed) * _FEW > len(nodes):
            self._key_layers.clear()
            self._other_layers.clear()
            return
        rows = changed.tolist()
        for key, layer in self._key_layers.items():
            by_value = self._by_value[key]
            new = self._key_layers[key] = self._long_enough(layer)
            values = (nodes.labels.of(row).get(key) for row in rows)
            new[changed] = [
                NOWHERE if value is None else by_value.get(value, NOWHERE) for value in values
            ]
        for number, layer in self._other_layers.items():
            new = self._other_layers[number] = self._long_enough(layer)
            new[changed] = np.where(self._inside(number, changed), number, NOWHERE)

    def _long_enough(self, layer: Layer) -> Layer:
        """Return a copy of a layer with an element for each row."""
        more = np.full(len(self._nodes) - len(layer), NOWHERE, dtype=np.int64)
        return np.concatenate((layer, more))

    def _inside(self, number: int, rows: Rows) -> NDArray[np.bool_]:
        """Return for each of `rows` whether it is in a place."""
        place = self._places[number]
        inside = np.full_like(self._nodes.alive[rows], place is None)
        for term in place or ():
            inside |= node_term_holds(term, self._nodes, rows)
        return inside

    def _key_layer(self, key: str) -> Layer:
        layer = self._key_layers.get(key)
        if layer is None:
            column = self._nodes.labels.column(key)
            table = np.full(column.values, NOWHERE, dtype=np.int64)
            for value, number in self._by_value[key].items():
                if known := column.known(value):
                    table[known] = number
            layer = self._key_layers[key] = table[column.ids[: len(self._nodes)]]
        return layer

    def _other_layer(self, number: int) -> Layer:
        layer = self._other_layers.get(number)
        if layer is None:
            inside = self._inside(number, slice(0, len(self._nodes)))
            layer = self._other_layers[number] = np.where(inside, number, NOWHERE)
        return layer


def place_of_selector(selector: LabelSelector) -> Place:
    """Return the place of nodes whose labels a selector selects; an empty one selects all."""
    requirements = [
        *(
            NodeSelectorRequirement(key=key, operator="In", values=(value,))
            for key, value in sorted(selector.match_labels.items())
        ),
        *(
            NodeSelectorRequirement(key=each.key, operator=each.operator, values=each.values)
            for each in selector.match_expressions
        ),
    ]
    if not requirements:
        return None
    return (NodeSelectorTerm(match_expressions=tuple(requirements)),)


def place_of_topologies(terms: tuple[TopologySelectorTerm, ...]) -> Place:
    """Return the place of the allowed topologies of a class; no term is everywhere."""
    if not terms:
        return None
    return tuple(
        NodeSelectorTerm(
            match_expressions=tuple(
                NodeSelectorRequirement(key=each.key, operator="In", values=each.values)
                for each in term.match_label_expressions
            )
        )
        for term in terms
    )


def _one_label(place: Place) -> tuple[str, str] | None:
    """Return (key, value) of a place that asks for one value of one label, else None."""
    if place is None or len(place) != 1:
        return None
    (term,) = place
    if term.match_fields or len(term.match_expressions) != 1:
        return None
    (requirement,) = term.match_expressions
    if requirement.operator != "In" or len(requirement.values) != 1:
        return None
    return requirement.key, requirement.values[0]

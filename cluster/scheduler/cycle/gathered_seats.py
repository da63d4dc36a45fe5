"""Seats a gang that is gathered in the network: which domain is freed for it.

The domain has to take all members. Domains of the deepest layer that the gang names come first,
then those of wider ones, up to the lowest layer where it must be gathered. Of the domains of a
layer, the one whose victims cost the least is taken, compared as DefaultPreemption compares nodes,
over all victims; then the one with more pods of the same job, with less headroom, with higher
scores, and by name, as where no evictions are needed.

What a domain costs is estimated first, by the amounts that pods request and as if each member had
to have room made where one member costs the least. Members are seated in the domains in that order.
docs/scheduler.md, "Network topology" and "Preemption".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.cycle.gang_order import place_in_gang
from cluster.scheduler.cycle.gathering import Gathering, NotGathered, Offers, named_layers
from cluster.scheduler.cycle.headroom import headroom_of
from cluster.scheduler.cycle.seating import Kind, Pod, Search, Seat, Seating, Within
from cluster.scheduler.cycle.trial import Trial
from cluster.scheduler.cycle.victim_columns import by_amounts, headroom_without_victims
from cluster.scheduler.cycle.victims import NO_VICTIM
from cluster.scheduler.plugins.between_pods.near_pods import same_job
from cluster.scheduler.plugins.contract import Refusal
from cluster.scheduler.tables.gather import Gather
from cluster.scheduler.tables.network_topology import NODE, OUTSIDE, NetworkTree
from cluster.scheduler.tables.shapes import PodShape

Column = NDArray[np.int64]

_MOST_DOMAINS: Final = 16
"""Domains of one layer in which a gang is seated, until one takes all of it. Chosen: amounts are
mostly right, so that the first does."""

_MOST_SEATED: Final = 100
"""Members that are seated in one domain after another, after which no other domain is compared with
the best one. Measured: a member takes 0.3 ms. A larger number would compare more domains exactly
instead of by their estimates, while nothing else is decided."""


_MOST_IN_VAIN: Final = 1_500
"""Members of a layer that are seated in domains which do not take all, until the layer is given up.
Chosen: 0.5 s; twice as many would try two more domains for a gang of a thousand."""

_CHEAPEST_IN_VAIN: Final = 500
"""After so many of these, the next domains are drawn, at each attempt again: those that refuse the
gang each time do not keep it from the rest for ever."""


@dataclass(frozen=True, slots=True)
class _Columns:
    """What rows offer, by row. free: members that a node takes as it is. most: members that it
    takes at most without its less important pods. existing: pods of the same job. scores: of the
    first member. The others: what one member costs there, as in `Costs`."""

    free: Column
    most: Column
    existing: Column
    scores: Column
    violations: Column
    highest: Column
    total: Column
    count: Column


class GatheredSeats:
    """The search for one gang, in a trial in which no member has a node."""

    def __init__(
        self, search: Search, tree: NetworkTree, gather: Gather, pods: Sequence[Pod]
    ) -> None:
        """pods: all members, in the order in which they are seated. Raises NotGathered for a layer
        that is not there."""
        self._search = search
        self._tables = search.tables
        self._tree = tree
        self._gather = gather
        self._pods = pods
        self._layers = named_layers(tree, gather)
        self._columns = self._work_out()
        # A domain is filled before the next one is begun, and so is a node.
        free = tree.sums(self._columns.free)[tree.domain_of]
        names = self._tables.nodes.order[: len(free)]
        self._rank = np.empty(len(free), dtype=np.uint64)
        in_order = np.lexsort((names, -self._columns.free, tree.domain_of, -free))
        self._rank[in_order] = np.arange(len(free))

    def seat(self, trial: Trial) -> tuple[Seat, ...]:
        """Return a seat for each member. Raises NotGathered, which says how many fit at most."""
        named = [self._layers.index(each) for each in (*self._gather.must, *self._gather.prefer)]
        lowest_must = max(map(self._layers.index, self._gather.must), default=0)
        for depth in sorted({lowest_must, *(each for each in named if each > lowest_must)})[::-1]:
            found = self._of_layer(depth, trial)
            if found is not None:
                return self._in_network_order(found)
        domain_of = self._domains(lowest_must)
        inside = domain_of != OUTSIDE
        rooms = np.bincount(domain_of[inside], weights=self._columns.most[inside])
        widest = int(rooms.max(initial=0))
        layer, count = self._layers[lowest_must], len(self._pods)
        if widest < count:
            raise NotGathered(
                f"without less important pods, a domain of {layer} has room for"
                f" {widest} of {count} pods at most"
            )
        raise NotGathered(f"evictions make room for all {count} pods in no domain of {layer}")

    # --- all domains at once ---------------------------------------------------------------------

    def _work_out(self) -> _Columns:
        search, tables = self._search, self._tables
        length = len(tables.nodes)
        alive = np.flatnonzero(tables.nodes.alive[:length])
        free, most = (np.zeros(length, dtype=np.int64) for _ in range(2))
        alike = Counter(search.kind(pod) for pod in self._pods)
        first = {search.kind(pod): pod for pod in reversed(self._pods)}
        without: dict[object, Column] = {}
        for kind, members in alike.items():
            pod = first[kind]
            try:
                evaluation = search.evaluate(pod.shape)
            except Refusal:
                continue
            requested, promised = search.requested(pod), search.promised(pod)
            as_it_is = headroom_of(pod.shape, evaluation, len(self._pods)).by_row
            key = (pod.shape.scheduler_name, pod.priority, requested)
            if key not in without:
                without[key] = headroom_without_victims(
                    tables, pod, alive, requested, search.may_be_victim, promised
                )
            rows = search.freeable(pod, evaluation)
            at_most = as_it_is.copy()
            at_most[rows] = np.maximum(as_it_is[rows], without[key][rows])
            most += np.minimum(at_most, members)
            as_it_is[list(promised)] = 0
            free += np.minimum(as_it_is, members)
        pod = first[alike.most_common(1)[0][0]]
        costs = by_amounts(
            tables,
            pod,
            alive,
            search.requested(pod),
            search.may_be_victim,
            search.budgets,
            search.promised(pod),
        )

        def by_row(values: Column, otherwise: int = 0) -> Column:
            column = np.full(length, otherwise, dtype=np.int64)
            column[costs.rows] = values
            return column

        leader = self._pods[0].shape
        counter = same_job(leader, tables)
        existing = np.zeros(length, dtype=np.int64)
        return _Columns(
            free=free,
            most=most,
            existing=existing if counter is None else counter.column(length).copy(),
            scores=self._scores(leader, length),
            violations=by_row(costs.violations),
            highest=by_row(costs.highest, NO_VICTIM),
            total=by_row(costs.total),
            count=by_row(costs.count),
        )

    def _scores(self, shape: PodShape, length: int) -> Column:
        scores = np.zeros(length, dtype=np.int64)
        try:
            evaluation = self._search.evaluate(shape)
        except Refusal:
            return scores
        scores[evaluation.feasible] = evaluation.totals
        return scores

    def _domains(self, depth: int) -> NDArray[np.intp]:
        """Return by row its domain of a layer, of nodes the row itself; OUTSIDE if it has none."""
        tree = self._tree
        inside = tree.domain_of != OUTSIDE
        if self._layers[depth] == NODE:
            return np.where(inside, np.arange(len(inside)), OUTSIDE)
        parents = np.array([domain.parent for domain in tree.domains], dtype=np.intp)
        domains = tree.domain_of.copy()
        for _ in range(len(tree.layers) - 1 - depth):
            domains[inside] = parents[domains[inside]]
        return domains

    def _in_order(self, domain_of: NDArray[np.intp], depth: int) -> Iterator[tuple[int, Column]]:
        """Yield the domains that may take the gang, those that are likely to cost the least first.

        Each with the members that its nodes are likely to get at most, by row.
        """
        columns, pods = self._columns, len(self._pods)
        # Rows by domain, and within it by what one member costs there.
        order = np.lexsort(
            (columns.count, columns.total, columns.highest, columns.violations, domain_of)
        )
        order = order[domain_of[order] != OUTSIDE]
        domains = domain_of[order]
        length = int(domain_of.max(initial=0)) + 1

        def sums(values: Column) -> Column:
            result = np.zeros(length, dtype=np.int64)
            np.add.at(result, domains, values)
            return result

        free = sums(columns.free[order])
        more = (columns.most - columns.free)[order]
        before = np.cumsum(more) - more
        begins = np.r_[True, domains[1:] != domains[:-1]][: len(domains)]
        before -= np.repeat(before[begins], np.diff(np.r_[np.flatnonzero(begins), len(domains)]))
        taken = np.clip(np.maximum(pods - free, 0)[domains] - before, 0, more)
        highest = np.full(length, NO_VICTIM, dtype=np.int64)
        np.maximum.at(highest, domains[taken > 0], columns.highest[order][taken > 0])
        most = sums(columns.most[order])
        names = {int(number): self._name(int(number), depth) for number in np.unique(domains)}
        ranks = np.zeros(length, dtype=np.int64)
        ranks[sorted(names, key=lambda number: names[number])] = np.arange(len(names))
        cheapest = np.lexsort(
            (
                ranks,
                -sums(columns.scores[order]),
                most,
                -sums(columns.existing[order]),
                sums(taken * columns.count[order]),
                sums(taken * columns.total[order]),
                highest,
                sums(taken * columns.violations[order]),
            )
        )
        likely = columns.free.copy()
        likely[order] += taken
        for number in cheapest[most[cheapest] >= pods].tolist():
            yield number, likely

    def _name(self, number: int, depth: int) -> str:
        if self._layers[depth] == NODE:
            return self._tables.nodes.name(number)
        return self._tree.domains[number].name

    # --- one domain after another ----------------------------------------------------------------

    def _of_layer(self, depth: int, trial: Trial) -> tuple[Seat, ...] | None:
        """Return the seats in the cheapest domain of a layer, or None if none takes the gang."""
        domain_of = self._domains(depth)
        best: tuple[Seat, ...] | None = None
        seated = 0
        left = list(self._in_order(domain_of, depth))
        drawn = False
        for _ in range(min(len(left), _MOST_DOMAINS)):
            if seated >= (_MOST_IN_VAIN if best is None else _MOST_SEATED):
                break
            if best is None and seated >= _CHEAPEST_IN_VAIN and not drawn:
                Random(self._search.salt).shuffle(left)
                drawn = True
            number, likely = left.pop(0)
            rows = domain_of == number
            for offered in self._offered(rows, likely):
                before = trial.mark()
                with self._search.budgets.trial():
                    seats = self._in_domain(rows, offered, trial)
                trial.back_to(before)
                seated += len(seats)
                if len(seats) == len(self._pods):
                    if best is None or _cost(seats) < _cost(best):
                        best = seats
                    break
            if best is not None and not any(seat.candidate.victims for seat in best):
                break
        return best

    def _offered(self, rows: NDArray[np.bool_], likely: Column) -> tuple[Column | None, ...]:
        """Return the members that nodes of a domain are to get at most, by row, as tried in turns.

        None where the gang does not ask for multiples: members are seated where it costs the least.
        """
        if not self._gather.multiples:
            return (None,)
        multiple = dict(self._gather.multiples).get(NODE, 1)
        most = np.where(rows, self._columns.most, 0)
        return np.minimum(-(-np.where(rows, likely, 0) // multiple) * multiple, most), most

    def _in_domain(
        self, rows: NDArray[np.bool_], offered: Column | None, trial: Trial
    ) -> tuple[Seat, ...]:
        """Return the seats of the members up to the first that finds none."""
        columns = self._columns
        seating = Seating(self._search, Within(rows, self._rank))
        nodes: list[int | None] = [None] * len(self._pods)
        if offered is not None:
            offers = Offers(offered, columns.existing, -columns.violations)
            try:
                filled = self._gathering(offers).choose()
            except NotGathered:
                return ()
            nodes = [row for row, count in filled for _ in range(count)]
        seats: list[Seat] = []
        for pod, row in zip(self._pods, nodes, strict=True):
            seat = seating.seat(pod, trial, row)
            if seat is None:
                break
            seats.append(seat)
        return tuple(seats)

    def _gathering(self, offers: Offers) -> Gathering:
        return Gathering(self._tree, self._tables.nodes, self._gather, offers, len(self._pods))

    def _in_network_order(self, seats: tuple[Seat, ...]) -> tuple[Seat, ...]:
        """Return the seats with members that may stand for each other in the order of the network.

        As without evictions, members that follow each other by index and name are close.
        """
        columns, search = self._columns, self._search
        counts = np.zeros(len(columns.free), dtype=np.int64)
        np.add.at(counts, [seat.candidate.row for seat in seats], 1)
        filled = self._gathering(Offers(counts, columns.existing, columns.scores)).choose()
        place = {row: number for number, (row, _) in enumerate(filled)}
        by_place = sorted(seats, key=lambda seat: place[seat.candidate.row])
        waiting: dict[Kind, list[Pod]] = {}
        for pod in sorted((seat.pod for seat in seats), key=place_in_gang, reverse=True):
            waiting.setdefault(search.kind(pod), []).append(pod)
        return tuple(
            Seat(waiting[search.kind(seat.pod)].pop(), seat.candidate) for seat in by_place
        )


def _cost(seats: Sequence[Seat]) -> tuple[float, ...]:
    """Return what the seats of two domains are compared by: as `Candidate.cost`, over all seats."""
    costs = [seat.candidate.cost for seat in seats if seat.candidate.victims]
    highest = max((cost[1] for cost in costs), default=NO_VICTIM)
    return (
        sum(cost[0] for cost in costs),
        highest,
        sum(cost[2] for cost in costs),
        sum(cost[3] for cost in costs),
        max((cost[4] for cost in costs if cost[1] == highest), default=0.0),
    )

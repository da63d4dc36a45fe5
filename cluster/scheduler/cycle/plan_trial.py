"""Whether the plan of a gathered gang can be carried out, and if not, where else its members fit.

A plan counts the headroom of each node by itself. What one member takes from others on further
nodes (anti-affinity and spread constraints by a label that several nodes share), exact CPUs,
devices and volumes show when its members are placed on the tables, one after another. Members that
find no node then are tried on the other nodes of the same domain, while the others stay where they
are. If some are left over, and members differ, the nodes of the domain are divided between them in
other ways: a member of the kind that the fewest nodes take comes next, on a node that the fewest
other kinds could use, and steps are taken back where a kind finds no node. That finds a division if
there is one, unless it takes more steps than are allowed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.cycle.evaluation import Evaluation
from cluster.scheduler.cycle.trial import RowChecks, Trial
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

_MOST_REFUSED: Final = 1_000
"""Nodes that pass the filters and refuse the exact allocation to a member without a node, for one
plan. Chosen: one takes 0.1 to 0.3 ms, while nothing else is decided."""

_MOST_DIVIDED: Final = 100
"""Members of a gang for which other divisions of a domain are looked for. Chosen: see below."""

_MOST_STEPS: Final = 400
"""Looks at the nodes for one kind, and members placed, in that search, over all plans of one
attempt; half of the rest for each plan. Chosen: one takes 0.1 to 0.3 ms, while nothing else is
decided. A gang of 100 in two kinds takes 200 where no step is taken back."""

Pod = PendingPod[PodShape]


@dataclass(slots=True)
class Tried:
    """nodes: of the pods that found one, by UID. taken: how many, by row. full: rows that took
    fewer than planned, and those that take no member beside these pods. moved: some are on other
    nodes than planned."""

    nodes: dict[str, str] = field(default_factory=dict)
    taken: Counter[int] = field(default_factory=Counter)
    full: set[int] = field(default_factory=set)
    moved: bool = False


class PlanTrial:
    """Places the members of one gang on the tables, which are as before after each call."""

    def __init__(
        self,
        tables: Tables,
        checks: Callable[[str], RowChecks],
        examine: Callable[[PodShape, str], Evaluation | None],
    ) -> None:
        """checks: by scheduler name. examine: shape and scheduler name -> every node's verdict, or
        None."""
        self._tables = tables
        self._checks = checks
        self._examine = examine
        self._steps = _MOST_STEPS

    def fill(self, filled: Iterable[tuple[int, int]], pods: Sequence[Pod]) -> Tried:
        """Fill nodes with pods in their order, passing over those that do not fit on a node.

        filled: (row, pods at most).
        """
        tried = Tried()
        with Trial(self._tables) as trial:
            self._fill(trial, filled, pods, tried)
        return tried

    def fill_domain(
        self, filled: Iterable[tuple[int, int]], rows: Callable[[], list[int]], pods: Sequence[Pod]
    ) -> Tried:
        """Fill nodes as `fill` does, and then the other nodes of the domain as far as needed.

        rows: returns all nodes of the domain, in the order in which they are to be taken.
        """
        tried = Tried()
        with Trial(self._tables) as trial:
            left = self._fill(trial, filled, pods, tried)
            if left:
                tried.moved = True
                domain = np.array(rows(), dtype=np.intp)
                refusing = self._place(trial, left, domain, tried)
                if len(tried.nodes) < len(pods):
                    self._close(pods, domain, refusing, tried)
                    trial.back_to(0)
                    return self._divide(trial, pods, domain) or tried
        return tried

    def _fill(
        self,
        trial: Trial,
        filled: Iterable[tuple[int, int]],
        pods: Sequence[Pod],
        tried: Tried,
    ) -> list[Pod]:
        """Return the pods that are left over."""
        left = list(pods)
        for row, count in filled:
            # Of what pods differ in, a node looks at their reduced shapes, and at the priorities of
            # those that it is promised to.
            unfit: set[tuple[PodShape, int]] = set()
            over: list[Pod] = []
            for number, pod in enumerate(left):
                if tried.taken[row] == count:
                    over += left[number:]
                    break
                if unfit and self._kind(pod) in unfit:
                    over.append(pod)
                elif not self._put(trial, pod, row, tried):
                    unfit.add(self._kind(pod))
                    over.append(pod)
            if tried.taken[row] < count:
                tried.full.add(row)
            left = over
        return left

    def _kind(self, pod: Pod) -> tuple[PodShape, int]:
        return self._tables.reduction.of(pod.shape), pod.priority

    def _put(self, trial: Trial, pod: Pod, row: int, tried: Tried) -> bool:
        """Place a pod on a node; return whether the node takes it."""
        booking = self._checks(pod.shape.scheduler_name).booking(pod, row)
        if booking is None:
            return False
        trial.place(booking)
        tried.nodes[pod.uid] = booking.node
        tried.taken[row] += 1
        return True

    def _place(
        self, trial: Trial, pods: Sequence[Pod], domain: NDArray[np.intp], tried: Tried
    ) -> set[tuple[PodShape, int]]:
        """Place pods on whatever nodes of the domain take them, and look at all nodes after each.

        Returns (reduced shape, row) of nodes that pass the filters and cannot give the exact
        allocation.
        """
        refusing: set[tuple[PodShape, int]] = set()
        left = list(pods)
        placed: Pod | None = left[0]
        while placed is not None:
            placed = None
            for kind, pod in self._first_of_each_kind(left):
                for row in self._open(pod.shape, domain):
                    if len(refusing) == _MOST_REFUSED:
                        return refusing
                    if (kind, row) in refusing:
                        continue
                    if self._put(trial, pod, row, tried):
                        placed = pod
                        break
                    refusing.add((kind, row))
                if placed is not None:
                    left.remove(placed)
                    break
        return refusing

    def _divide(self, trial: Trial, pods: Sequence[Pod], domain: NDArray[np.intp]) -> Tried | None:
        """Return nodes of the domain for all pods, in whatever division; None if none was found."""
        left: dict[PodShape, list[Pod]] = {}
        for pod in reversed(pods):
            left.setdefault(self._tables.reduction.of(pod.shape), []).append(pod)
        if len(left) == 1 or len(pods) > _MOST_DIVIDED:
            # Pods of one kind were tried on all nodes already.
            return None
        tried = Tried(moved=True)
        at_most = self._steps // 2
        self._steps -= at_most
        steps = 0
        # One entry for each member that is placed, and one for the next: where the trial was, the
        # kind that is placed there, and its nodes that are not tried yet, the last one first.
        stack = [(trial.mark(), *self._next_kind(left, domain))]
        placed: list[Pod] = []
        while stack:
            mark, kind, rows = stack[-1]
            if len(placed) == len(stack):
                pod = placed.pop()
                trial.back_to(mark)
                left[kind].append(pod)
                tried.taken[self._row_of(tried.nodes.pop(pod.uid))] -= 1
            if not rows:
                stack.pop()
                continue
            if steps >= at_most:
                break
            steps += 1
            pod = left[kind][-1]
            if not self._put(trial, pod, rows.pop(), tried):
                continue
            placed.append(left[kind].pop())
            if len(placed) == len(pods):
                self._steps += at_most - steps
                return tried
            steps += sum(map(bool, left.values()))
            stack.append((trial.mark(), *self._next_kind(left, domain)))
        self._steps += max(at_most - steps, 0)
        return None

    def _next_kind(
        self, left: Mapping[PodShape, Sequence[Pod]], domain: NDArray[np.intp]
    ) -> tuple[PodShape, list[int]]:
        """Return the kind that the fewest nodes take, with these nodes, the one to try first last.

        Those come first that the fewest other kinds could use.
        """
        open_rows = {kind: self._open(of[-1].shape, domain) for kind, of in left.items() if of}
        kinds = Counter(row for rows in open_rows.values() for row in rows)
        kind = min(open_rows, key=lambda each: len(open_rows[each]))
        return kind, sorted(open_rows[kind], key=lambda row: kinds[row])[::-1]

    def _row_of(self, node: str) -> int:
        row = self._tables.nodes.row(node)
        if row is None:
            raise KeyError(node)
        return row

    def _close(
        self,
        pods: Sequence[Pod],
        domain: NDArray[np.intp],
        refusing: set[tuple[PodShape, int]],
        tried: Tried,
    ) -> None:
        """Note the nodes of the domain that take no member beside those that are placed."""
        open_rows = {
            row
            for kind, pod in self._first_of_each_kind(pods)
            for row in self._open(pod.shape, domain)
            if (kind, row) not in refusing
        }
        tried.full.update(row for row in domain.tolist() if row not in open_rows)

    def _first_of_each_kind(self, pods: Iterable[Pod]) -> Iterator[tuple[PodShape, Pod]]:
        """Yield the first of the pods for which nodes mean the same, with their reduced shape."""
        seen: set[PodShape] = set()
        for pod in pods:
            kind = self._tables.reduction.of(pod.shape)
            if kind not in seen:
                seen.add(kind)
                yield kind, pod

    def _open(self, shape: PodShape, domain: NDArray[np.intp]) -> list[int]:
        """Return the rows of the domain that pass all filters now, in their order."""
        evaluation = self._examine(shape, shape.scheduler_name)
        if evaluation is None:
            return []
        found: list[int] = domain[np.isin(domain, evaluation.feasible)].tolist()
        return found

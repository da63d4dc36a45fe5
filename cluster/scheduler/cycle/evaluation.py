"""Masks and scores of all nodes for a pod, kept for its reduced shape.

After a placement one row has changed, so one row is evaluated again for each shape that comes next.
A plugin whose result depends on more than the row says so by its `cluster_version`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.cycle.timings import (
    FILTER,
    PRE_FILTER,
    SCORE,
    SUCCESS,
    UNRESOLVABLE,
    UNSCHEDULABLE,
    Tally,
    Timings,
)
from cluster.scheduler.plugins.contract import (
    Admission,
    Allocator,
    AppliesByShape,
    Explainer,
    Filter,
    Mask,
    OfNodeAlone,
    Preference,
    Refusal,
    RowFilter,
    RowScore,
    Score,
    ScoredAsIs,
    Scores,
    SetScore,
)
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

_FEW: Final = 8
"""Up to this part (1/8) of the rows is evaluated as a list of rows; above it the whole table costs
less, because a list of rows copies what it reads. Measured at 5,000 nodes."""

_ONE_BY_ONE: Final = 4
"""Up to so many rows are evaluated one by one, where plugins can do so. Measured: a row takes a
plugin 2 to 4 us then, and a list of rows 16 to 30 us, however few they are."""

_NO_SCORES: Final[Scores] = np.zeros(0, dtype=np.int64)
"""In place of what is not worked out yet."""

_MOST_KEPT: Final = 128
"""Reduced shapes whose masks and scores are kept, the ones used last. Chosen: a burst of pods has
fewer, mostly; at 5,000 nodes and 12 plugins each takes 0.5 MB."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The plugins of one scheduler name, in their order, with the weights of scores.

    Plugins may be shared between profiles; they keep nothing between calls.
    """

    scheduler_name: str
    admissions: tuple[Admission, ...] = ()
    filters: tuple[Filter, ...] = ()
    scores: tuple[tuple[Score, int], ...] = ()
    set_scores: tuple[tuple[SetScore, int], ...] = ()
    allocators: tuple[Allocator, ...] = ()
    preferences: tuple[Preference, ...] = ()
    explainers: tuple[Explainer, ...] = ()


class Part(NamedTuple):
    """What one plugin adds to the totals: weight * scores, which are by row and 0..100."""

    name: str
    weight: int
    scores: Scores


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Every node's verdict on a pod at one moment. Valid until the tables change.

    masks: (filter, mask by row) in the filters' order. feasible: rows that pass, ascending.
    totals: weighted sum of the scores of each feasible row. parts: what it consists of; valid until
    the shape is evaluated again.
    """

    masks: tuple[tuple[Filter, Mask], ...]
    feasible: NDArray[np.intp]
    totals: Scores
    tables: Tables
    parts: tuple[Part, ...] = ()

    def best(self, salt: int, *, without: Sequence[int] = ()) -> int | None:
        """Return the row with the highest total, or None. Equal totals are drawn by `salt`.

        The draw depends on names and salt alone, not on the order in which nodes appeared.
        """
        feasible, totals = self.feasible, self.totals
        if without:
            keep = ~np.isin(feasible, without)
            feasible, totals = feasible[keep], totals[keep]
        if not len(feasible):
            return None
        # The element at argmax takes half the time of max.
        ties = feasible[totals == totals[totals.argmax()]]
        if len(ties) == 1:
            return int(ties[0])
        order = self.tables.nodes.order[ties] ^ np.uint64(salt)
        return int(ties[order.argmin()])

    def drawn(self, salt: int, *, without: Sequence[int] = ()) -> int | None:
        """Return a row that is drawn by `salt`, whatever its total, or None."""
        feasible = self.feasible[~np.isin(self.feasible, without)]
        if not len(feasible):
            return None
        return int(feasible[(self.tables.nodes.order[feasible] ^ np.uint64(salt)).argmin()])

    def only(self, row: int | None) -> Evaluation:
        """Return the same verdicts with no other row than this one to choose from."""
        here = self.feasible == (-1 if row is None else row)
        return replace(self, feasible=self.feasible[here], totals=self.totals[here])

    def with_last(self, row: int) -> tuple[Evaluation, Evaluation]:
        """Return the same verdicts without a row to choose from, and with this row alone."""
        others = self.feasible != row
        rest = replace(self, feasible=self.feasible[others], totals=self.totals[others])
        return rest, self.only(row)

    def first(self, rows: Iterable[int], *, without: Container[int] = ()) -> int | None:
        """Return the first of `rows` that is feasible, or None."""
        for row in rows:
            position = int(np.searchsorted(self.feasible, row))
            known = position < len(self.feasible) and self.feasible[position] == row
            if known and row not in without:
                return row
        return None


Held = Mapping[int, tuple[tuple[Filter, int], ...]]
"""Row -> (filter, mask) of nodes that are held back for another reason than their own state."""

Promises = Callable[[NDArray[np.intp]], Held]
"""Rows that pass as they are -> those that do not once what is promised there counts too."""


class Evaluator:
    """Evaluates pods of one profile. Refusals of plugins without a node dimension come first."""

    def __init__(self, profile: Profile, tables: Tables) -> None:
        self.profile = profile
        self.timings = Timings()
        self._tables = tables
        self._kept: OrderedDict[PodShape, _Kept] = OrderedDict()
        self._admissions = tuple(
            (each, self.timings.tally(each.name, PRE_FILTER)) for each in profile.admissions
        )

    def evaluate(self, pod: PodShape, promises: Promises | None = None) -> Evaluation:
        """Return every node's verdict. Raises Refusal.

        promises: decides further about the nodes that pass; None where nothing is promised.
        """
        timings = self.timings
        began = timings.begin()
        try:
            self.admit(pod)
            kept = self._kept_of(pod)
        except Refusal as refusal:
            status = UNSCHEDULABLE if refusal.resolvable else UNRESOLVABLE
            timings.step(PRE_FILTER, status, timings.clock() - began)
            raise
        now = timings.clock()
        timings.step(PRE_FILTER, SUCCESS, now - began)
        return self._evaluate_nodes(kept, promises, now)

    def evaluate_nodes(self, pod: PodShape, promises: Promises | None = None) -> Evaluation:
        """Return every node's verdict, without asking the admissions. Raises Refusal."""
        began = self.timings.begin()
        return self._evaluate_nodes(self._kept_of(pod), promises, began)

    def admit(self, pod: PodShape) -> None:
        """Ask the plugins without a node dimension. Raises Refusal."""
        timings, sampled = self.timings, self.timings.sampled
        began = 0.0
        for admission, tally in self._admissions:
            if sampled:
                began = timings.clock()
            tally.nodes += 1
            admission.check(pod, self._tables)
            if sampled:
                timings.plugin(admission.name, PRE_FILTER, SUCCESS, timings.clock() - began)

    def _kept_of(self, pod: PodShape) -> _Kept:
        """Return what is kept for a shape, made if need be. Raises Refusal."""
        pod = self._tables.reduction.of(pod)
        kept = self._kept.get(pod)
        if kept is None or kept.other_plugins_apply():
            kept = self._kept[pod] = _Kept(pod, self.profile, self._tables, self.timings)
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(pod)
        return kept

    def _evaluate_nodes(self, kept: _Kept, promises: Promises | None, began: float) -> Evaluation:
        timings = self.timings
        rows = kept.follow_filters()
        feasible, masks = kept.feasible(), kept.masks()
        held = promises(feasible) if promises is not None else None
        if held:
            feasible = feasible[~np.isin(feasible, list(held))]
            masks = self._with_held(masks, held)
        filtered = timings.clock()
        timings.step(FILTER, SUCCESS, filtered - began)
        kept.follow_scores(rows)
        totals, parts = kept.totals(feasible)
        timings.step(SCORE, SUCCESS, timings.clock() - filtered)
        return Evaluation(masks, feasible, totals, self._tables, parts)

    def _with_held(
        self, masks: tuple[tuple[Filter, Mask], ...], held: Held
    ) -> tuple[tuple[Filter, Mask], ...]:
        """Return the masks with those of the rows that are held back, in the filters' order."""
        merged = {id(plugin): mask.copy() for plugin, mask in masks}
        for row, of_row in held.items():
            for plugin, bits in of_row:
                if id(plugin) not in merged:
                    merged[id(plugin)] = np.zeros(len(self._tables.nodes), dtype=np.int64)
                if bits:
                    merged[id(plugin)][row] |= bits
        return tuple(
            (plugin, merged[id(plugin)]) for plugin in self.profile.filters if id(plugin) in merged
        )


class _Changed(NamedTuple):
    """What changed since an evaluation.

    rows: all rows that changed. of_objects: those whose Node object did. few: the numbers of
    `rows` if they are evaluated one by one, else none. version: of the node table.
    """

    every: slice
    rows: Rows
    of_objects: Rows
    few: tuple[int, ...]
    version: int


class _Kept:
    """Masks and scores of one shape, as of one version of the node table."""

    def __init__(self, pod: PodShape, profile: Profile, tables: Tables, timings: Timings) -> None:
        self._pod = pod
        self._tables = tables
        self._timings = timings
        self._filters = tuple(f for f in profile.filters if f.applies(pod, tables))
        self._scores = tuple((s, w) for s, w in profile.scores if s.applies(pod, tables))
        self._set_scores = tuple((s, w) for s, w in profile.set_scores if s.applies(pod, tables))
        self._filter_tallies = _tallies(timings, self._filters, FILTER)
        self._score_tallies = _tallies(timings, (s for s, _ in self._scores), SCORE)
        self._set_score_tallies = _tallies(timings, (s for s, _ in self._set_scores), SCORE)
        plugins: tuple[Filter | Score | SetScore, ...] = (
            *profile.filters,
            *(score for score, _ in profile.scores),
            *(score for score, _ in profile.set_scores),
        )
        # A plugin that is both a filter and a score is asked once.
        by_tables = {id(each): each for each in plugins if not isinstance(each, AppliesByShape)}
        self._asked_again = tuple(each.applies for each in by_tables.values())
        self._applied = self._answers()
        self._version: int | None = None
        """Of the node table, as far as masks and scores follow it. None: no row is known."""
        self._length = 0
        self._filter_versions: list[int | None] = [None] * len(self._filters)
        self._score_versions: list[int | None] = [None] * len(self._scores)
        self._masks: list[Mask] = [_NO_SCORES] * len(self._filters)
        self._raw: list[Scores] = [_NO_SCORES] * len(self._scores)
        self._filter_rows = tuple(
            f.filter_row if isinstance(f, RowFilter) else None for f in self._filters
        )
        self._score_rows = tuple(
            s.score_row if isinstance(s, RowScore) else None for s, _ in self._scores
        )
        self._filters_of_node_alone = tuple(isinstance(f, OfNodeAlone) for f in self._filters)
        self._scores_of_node_alone = tuple(isinstance(s, OfNodeAlone) for s, _ in self._scores)
        self._as_is = tuple(
            (number, weight)
            for number, (score, weight) in enumerate(self._scores)
            if isinstance(score, ScoredAsIs)
        )
        self._normalised = tuple(
            number
            for number, (score, _) in enumerate(self._scores)
            if not isinstance(score, ScoredAsIs)
        )
        self._parts = [Part(score.name, weight, _NO_SCORES) for score, weight in self._scores]
        """A part for each score. Those of scores that need no normalising hold the array of `_raw`;
        the others are replaced in `totals`."""
        self._sum = _NO_SCORES
        """Weighted sum of the scores that need no normalising, by row."""
        self._passes: NDArray[np.bool_]
        """By row; made, as the next one, when the filters are followed for the first time."""
        self._feasible: NDArray[np.intp]

    def other_plugins_apply(self) -> bool:
        """Return whether other plugins apply than when this was made. Raises Refusal."""
        return self._applied != self._answers()

    def _answers(self) -> list[bool]:
        """Ask the plugins whose `applies` follows from tables, too. Raises Refusal."""
        pod, tables = self._pod, self._tables
        return [applies(pod, tables) for applies in self._asked_again]

    def follow_filters(self) -> _Changed:
        """Filter again what changed since the last time. Returns the rows to score again.

        After an exception, here or before `follow_scores` is done, all rows are evaluated again.
        """
        nodes = self._tables.nodes
        length = len(nodes)
        every = slice(0, length)
        since, self._version = self._version, None
        if since is None or length != self._length:
            self._length = length
            changed = _Changed(every, every, every, (), nodes.version)
        else:
            rows = _few(nodes.changed_since(since), every)
            of_objects = _few(nodes.objects_changed_since(since), every)
            few: tuple[int, ...] = ()
            if not isinstance(rows, slice) and len(rows) <= _ONE_BY_ONE:
                few = tuple(rows.tolist())
            changed = _Changed(every, rows, of_objects, few, nodes.version)
        self._follow_filters(changed)
        return changed

    def _follow_filters(self, changed: _Changed) -> None:
        pod, tables = self._pod, self._tables
        timings, sampled = self._timings, self._timings.sampled
        began = 0.0
        every, of_all, of_objects, few, _ = changed
        rows_of_all = of_all
        for number, plugin in enumerate(self._filters):
            if sampled:
                began = timings.clock()
            version = plugin.cluster_version(pod, tables)
            rows = of_objects if self._filters_of_node_alone[number] else of_all
            by_row = self._filter_rows[number] if few else None
            if version != self._filter_versions[number] or isinstance(rows, slice):
                self._masks[number] = plugin.filter(pod, tables, every)
                self._filter_versions[number] = version
                self._filter_tallies[number].nodes += self._length
                rows_of_all = every
            elif by_row is not None:
                mask = self._masks[number]
                for row in few:
                    mask[row] = by_row(pod, tables, row)
                self._filter_tallies[number].nodes += len(few)
            elif len(rows):
                self._masks[number][rows] = plugin.filter(pod, tables, rows)
                self._filter_tallies[number].nodes += len(rows)
            else:
                continue
            if sampled:
                timings.plugin(plugin.name, FILTER, SUCCESS, timings.clock() - began)
        if isinstance(rows_of_all, slice) or len(rows_of_all) != len(few):
            self._passes = tables.nodes.alive[every].copy()
            for mask in self._masks:
                self._passes &= mask == 0
            self._feasible = np.flatnonzero(self._passes)
        else:
            new = [self._pass(row) for row in few]
            if any(new):
                self._feasible = np.flatnonzero(self._passes)

    def _pass(self, row: int) -> bool:
        """Work out whether a row passes; return whether that is new."""
        bits = 0
        for mask in self._masks:
            bits |= mask.item(row)
        passes = bool(self._tables.nodes.alive.item(row)) and not bits
        new: bool = passes != self._passes.item(row)
        self._passes[row] = passes
        return new

    def follow_scores(self, changed: _Changed) -> None:
        """Score again what changed. changed: as `follow_filters` returned it."""
        pod, tables = self._pod, self._tables
        timings, sampled = self._timings, self._timings.sampled
        began = 0.0
        every, of_all, of_objects, few, _ = changed
        rows_of_all = of_all
        for number, (score, weight) in enumerate(self._scores):
            if sampled:
                began = timings.clock()
            version = score.cluster_version(pod, tables)
            rows = of_objects if self._scores_of_node_alone[number] else of_all
            by_row = self._score_rows[number] if few else None
            if version != self._score_versions[number] or isinstance(rows, slice):
                raw = self._raw[number] = score.score(pod, tables, every)
                self._parts[number] = Part(score.name, weight, raw)
                self._score_versions[number] = version
                self._score_tallies[number].nodes += self._length
                rows_of_all = every
            elif by_row is not None:
                raw = self._raw[number]
                for row in few:
                    raw[row] = by_row(pod, tables, row)
                self._score_tallies[number].nodes += len(few)
            elif len(rows):
                self._raw[number][rows] = score.score(pod, tables, rows)
                self._score_tallies[number].nodes += len(rows)
            else:
                continue
            if sampled:
                timings.plugin(score.name, SCORE, SUCCESS, timings.clock() - began)
        self._add_up(rows_of_all, few)
        self._version = changed.version

    def feasible(self) -> NDArray[np.intp]:
        return self._feasible

    def masks(self) -> tuple[tuple[Filter, Mask], ...]:
        return tuple(zip(self._filters, self._masks, strict=True))

    def totals(self, feasible: NDArray[np.intp]) -> tuple[Scores, tuple[Part, ...]]:
        """Return the totals of the feasible rows, and what they consist of."""
        # Of equal length, `feasible` is every row.
        every = len(feasible) == self._length
        totals = self._sum.copy() if every else self._sum.take(feasible)
        parts = self._parts.copy()
        for number in self._normalised:
            score, weight = self._scores[number]
            scores = score.normalize(self._raw[number][feasible])
            totals += weight * scores
            parts[number] = Part(score.name, weight, self._by_row(feasible, scores))
        timings, sampled = self._timings, self._timings.sampled
        began = 0.0
        for number, (set_score, weight) in enumerate(self._set_scores):
            if sampled:
                began = timings.clock()
            scores = set_score.score_set(self._pod, self._tables, feasible)
            self._set_score_tallies[number].nodes += len(feasible)
            if sampled:
                timings.plugin(set_score.name, SCORE, SUCCESS, timings.clock() - began)
            totals += weight * scores
            parts.append(Part(set_score.name, weight, self._by_row(feasible, scores)))
        return totals, tuple(parts)

    def _add_up(self, rows: Rows, few: Sequence[int]) -> None:
        """Work out the sum of the scores that need no normalising, for rows or for all.

        few: the rows, if they are evaluated one by one.
        """
        if isinstance(rows, slice):
            self._sum = np.zeros(rows.stop, dtype=np.int64)
        elif few:
            for row in few:
                total = 0
                for number, weight in self._as_is:
                    total += weight * self._raw[number].item(row)
                self._sum[row] = total
            return
        else:
            self._sum[rows] = 0
        for number, weight in self._as_is:
            self._sum[rows] += weight * self._raw[number][rows]

    def _by_row(self, feasible: NDArray[np.intp], scores: Scores) -> Scores:
        result = np.zeros(self._length, dtype=np.int64)
        result[feasible] = scores
        return result


def _few(rows: NDArray[np.intp], every: slice) -> Rows:
    """Return `rows`, or `every` row where these are many."""
    return rows if len(rows) * _FEW <= every.stop else every


def _tallies(
    timings: Timings, plugins: Iterable[Filter | Score | SetScore], step: str
) -> tuple[Tally, ...]:
    return tuple(timings.tally(plugin.name, step) for plugin in plugins)

"""Which plugins a profile calls at each extension point, in which order, with which weights.

A profile starts with kube-scheduler's plugins at "MultiPoint", which stands for all the points that
a plugin extends. What the file enables and disables is merged with that in two steps:

1. MultiPoint itself. A default plugin that the file disables there (by name or "*") is removed. A
   default plugin that the file enables there keeps its place and takes the file's weight. Other
   plugins that the file enables follow.
2. Each point, unless the file disables "*" there, in which case the point has what the file enables
   and nothing else. Otherwise three groups in this order: plugins of MultiPoint that the file also
   enables at the point, in the order of the point; the other plugins of MultiPoint, without those
   that the file disables at the point; the other plugins that the file enables at the point.

The weight of a plugin that stands in the score list of the file is that entry's, also when it has
none, which means 1: the default weight does not shine through. Source: kube-scheduler 1.35.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from apis.fields import get_field
from cluster.scheduler.configuration.plugin_arguments import Arguments
from cluster.scheduler.configuration.points import (
    DEFAULT_MULTI_POINT,
    DEFAULT_WEIGHTS,
    PLUGINS,
    REMOVED,
    Point,
)
from cluster.scheduler.configuration.strict import Problems, Section

ALL: Final = "*"
MULTI_POINT: Final = "multiPoint"
DEFAULT_PRE_BIND: Final = "DefaultPreBind"


class PluginEntry(Section, frozen=True):
    """A plugin of a list in the file. weight: of its score; 0 stands for the default, 1.

    A total score, the sum of weight * score over all plugins, fits an int64 with these bounds: that
    takes more than 40 million plugins.
    """

    name: str
    weight: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0


class PluginSet(Section, frozen=True):
    """What the file says about one point."""

    enabled: tuple[PluginEntry, ...] = ()
    disabled: tuple[PluginEntry, ...] = ()


_EMPTY: Final = PluginSet()


class Plugins(Section, frozen=True):
    """The section `plugins` of a profile."""

    pre_enqueue: PluginSet = _EMPTY
    queue_sort: PluginSet = _EMPTY
    pre_filter: PluginSet = _EMPTY
    filter: PluginSet = _EMPTY
    post_filter: PluginSet = _EMPTY
    pre_score: PluginSet = _EMPTY
    score: PluginSet = _EMPTY
    reserve: PluginSet = _EMPTY
    permit: PluginSet = _EMPTY
    pre_bind: PluginSet = _EMPTY
    bind: PluginSet = _EMPTY
    post_bind: PluginSet = _EMPTY
    multi_point: PluginSet = _EMPTY
    placement_generate: PluginSet = _EMPTY
    placement_score: PluginSet = _EMPTY

    def at(self, point: Point) -> PluginSet:
        """Return what the file says about `point`."""
        found: PluginSet = getattr(self, point.name.lower())
        return found


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """How the pods of one schedulerName are scheduled.

    plugins: for each point the plugins in the order of their calls, without those left out here.
    score_weights: of the plugins at the point score.
    """

    scheduler_name: str
    plugins: Mapping[Point, tuple[str, ...]]
    score_weights: Mapping[str, int]
    arguments: Arguments
    percentage_of_nodes_to_score: int | None = None


class Merged(msgspec.Struct, frozen=True):
    """The effective plugins of a profile."""

    plugins: Mapping[Point, tuple[str, ...]]
    score_weights: Mapping[str, int]


def merge(plugins: Plugins | None, problems: Problems) -> Merged | None:
    """Return the effective plugins; None where they cannot schedule, which is then noted.

    plugins: the section of the file, whose names have been checked; None where a profile has none:
    then DefaultPreBind is not added either.
    """
    before = len(problems.errors)
    said = plugins or Plugins()
    multi_point = _multi_point(said.multi_point)
    effective = {
        point: tuple(name for name in _at_point(said, point, multi_point) if _called(name))
        for point in Point
    }
    if plugins is not None and _adds_pre_bind(said.pre_bind, effective[Point.PRE_BIND]):
        effective[Point.PRE_BIND] += (DEFAULT_PRE_BIND,)
    weights = _weights(effective[Point.SCORE], said.score, multi_point)
    _check_whole(effective, problems)
    return None if len(problems.errors) > before else Merged(effective, weights)


def _called(name: str) -> bool:
    return not PLUGINS[name].left_out


def _multi_point(said: PluginSet) -> dict[str, int | None]:
    """Return name -> weight of the plugins of MultiPoint, in order. None and 0 stand for 1."""
    disabled = {each.name for each in said.disabled}
    enabled = {each.name: each.weight for each in said.enabled}
    merged: dict[str, int | None] = {}
    if ALL not in disabled:
        for name in DEFAULT_MULTI_POINT:
            if name not in disabled:
                merged[name] = enabled.get(name, DEFAULT_WEIGHTS.get(name))
    for name, weight in enabled.items():
        merged.setdefault(name, weight)
    return merged


def _at_point(said: Plugins, point: Point, multi_point: Iterable[str]) -> Sequence[str]:
    entries = said.at(point)
    enabled = [each.name for each in entries.enabled]
    disabled = {each.name for each in entries.disabled}
    if ALL in disabled:
        return enabled
    expanded = [
        name for name in multi_point if point in PLUGINS[name].points and name not in disabled
    ]
    reconfigured = [name for name in enabled if name in expanded]
    return [
        *reconfigured,
        *(name for name in expanded if name not in enabled),
        *(name for name in enabled if name not in expanded),
    ]


def _adds_pre_bind(said: PluginSet, effective: Sequence[str]) -> bool:
    """Upstream adds DefaultPreBind, which writes what the other plugins recorded, to each profile
    that has a section of plugins, unless that names it or disables it."""
    disabled = {each.name for each in said.disabled}
    return DEFAULT_PRE_BIND not in effective and not disabled & {DEFAULT_PRE_BIND, ALL}


def _weights(
    effective: Sequence[str], said: PluginSet, multi_point: Mapping[str, int | None]
) -> dict[str, int]:
    explicit = {each.name: each.weight for each in said.enabled}
    return {name: explicit.get(name, multi_point.get(name)) or 1 for name in effective}


# --- checks --------------------------------------------------------------------------------------


def check_names(tree: Any, problems: Problems) -> None:
    """Note each name in a section `plugins` that cannot stand where it does.

    tree: as the file has it. What has another shape than a section is passed over; reading it notes
    that.
    """
    for name in Plugins.__struct_encode_fields__:
        entries = get_field(tree, (name,), {})
        _check_enabled(_names(entries, "enabled"), name, problems.below(name, "enabled"))
        at = problems.below(name, "disabled")
        for index, each in _names(entries, "disabled"):
            if problems.full:
                return
            if each not in PLUGINS and each not in REMOVED and each != ALL:
                at.add((index, "name"), each, "unknown plugin", meant(each))


def _names(entries: Any, member: str) -> list[tuple[int, str]]:
    """Return (index, name) of the entries of a list that have a name."""
    found = get_field(entries, (member,))
    listed = found if isinstance(found, list) else []
    named = ((index, get_field(each, ("name",))) for index, each in enumerate(listed))
    return [(index, name) for index, name in named if isinstance(name, str)]


def _check_enabled(names: Sequence[tuple[int, str]], place: str, problems: Problems) -> None:
    seen: set[str] = set()
    for index, name in names:
        if problems.full:
            return
        problem, hint = _cannot_enable(name, place)
        if problem is None and name in seen:
            problem = "stands twice"
        if problem:
            problems.add((index, "name"), name, problem, hint)
        seen.add(name)


def _cannot_enable(name: str, place: str) -> tuple[str | None, str | None]:
    """Return why a plugin cannot be enabled at a place, a point or multiPoint, and a hint."""
    if name in REMOVED:
        return "was removed from kube-scheduler", "it can be disabled only"
    known = PLUGINS.get(name)
    if known is None:
        return "unknown plugin", meant(name)
    if place == MULTI_POINT or place in known.points:
        return None, None
    here = ", ".join(each for each, plugin in PLUGINS.items() if place in plugin.points)
    there = ", ".join(each.value for each in Point if each in known.points)
    return f"does not extend {place} but {there}", f"plugins of {place}: {here or 'none'}"


def meant(name: str) -> str:
    """Return a hint about the plugin that an unknown name perhaps means."""
    close = get_close_matches(name[:64], PLUGINS, n=2)  # 64: twice the longest name
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"known plugins: {', '.join(PLUGINS)}"


def _check_whole(effective: Mapping[Point, tuple[str, ...]], problems: Problems) -> None:
    # PrioritySort is the only plugin of queueSort, so all profiles sort alike, as they must: they
    # share one queue.
    if not effective[Point.QUEUE_SORT]:
        problems.add(
            ("queueSort",),
            "(none)",
            "a profile needs a plugin that sorts the queue",
            "enable PrioritySort",
        )
    if not effective[Point.BIND]:
        problems.add(
            ("bind",), "(none)", "a profile needs a plugin that binds", "enable DefaultBinder"
        )

"""The effective plugins of a profile: kube-scheduler's defaults merged with the file's lists."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.scheduler.configuration.points import DEFAULT_MULTI_POINT, PLUGINS, Point
from cluster.scheduler.configuration.profiles import Profile
from cluster.scheduler.configuration.reading import default_configuration
from tests.cluster.scheduler.configuration.files import (
    Tree,
    chart_file,
    enabled,
    errors_of,
    file,
    load,
)


def profile(plugins: Tree | None = None) -> Profile:
    tree: Tree = {} if plugins is None else {"plugins": plugins}
    return load(file(profiles=[tree])).profiles[0]


def at(point: Point, plugins: Tree | None = None) -> tuple[str, ...]:
    return profile(plugins).plugins[point]


def test_a_process_without_a_file_has_the_plugins_of_kube_scheduler() -> None:
    found = default_configuration().profiles
    assert [each.scheduler_name for each in found] == ["default-scheduler"]
    assert found[0].plugins == {
        Point.PRE_ENQUEUE: ("SchedulingGates", "DefaultPreemption"),
        Point.QUEUE_SORT: ("PrioritySort",),
        Point.PRE_FILTER: (
            "NodeAffinity",
            "NodePorts",
            "NodeResourcesFit",
            "VolumeRestrictions",
            "NodeVolumeLimits",
            "VolumeBinding",
            "VolumeZone",
            "PodTopologySpread",
            "InterPodAffinity",
            "NodeDeclaredFeatures",
        ),
        Point.FILTER: (
            "NodeUnschedulable",
            "NodeName",
            "TaintToleration",
            "NodeAffinity",
            "NodePorts",
            "NodeResourcesFit",
            "VolumeRestrictions",
            "NodeVolumeLimits",
            "VolumeBinding",
            "VolumeZone",
            "PodTopologySpread",
            "InterPodAffinity",
            "NodeDeclaredFeatures",
        ),
        Point.POST_FILTER: ("DefaultPreemption",),
        Point.PRE_SCORE: (
            "TaintToleration",
            "NodeAffinity",
            "NodeResourcesFit",
            "VolumeBinding",
            "PodTopologySpread",
            "InterPodAffinity",
            "NodeResourcesBalancedAllocation",
        ),
        Point.SCORE: (
            "TaintToleration",
            "NodeAffinity",
            "NodeResourcesFit",
            "VolumeBinding",
            "PodTopologySpread",
            "InterPodAffinity",
            "NodeResourcesBalancedAllocation",
            "ImageLocality",
        ),
        Point.RESERVE: ("VolumeBinding",),
        Point.PERMIT: (),
        Point.PRE_BIND: ("VolumeBinding",),
        Point.BIND: ("DefaultBinder",),
        Point.POST_BIND: (),
    }
    assert found[0].score_weights == {
        "TaintToleration": 3,
        "NodeAffinity": 2,
        "NodeResourcesFit": 1,
        "VolumeBinding": 1,
        "PodTopologySpread": 2,
        "InterPodAffinity": 2,
        "NodeResourcesBalancedAllocation": 1,
        "ImageLocality": 1,
    }


def test_the_charts_profile_calls_koordinators_plugins_after_the_default_ones() -> None:
    found = load(chart_file()).profiles[0]
    default = default_configuration().profiles[0].plugins
    assert found.plugins == {
        Point.PRE_ENQUEUE: (*default[Point.PRE_ENQUEUE], "Coscheduling"),
        Point.QUEUE_SORT: ("PrioritySort",),
        Point.PRE_FILTER: (
            *default[Point.PRE_FILTER],
            "SchedulingHint",
            "Coscheduling",
            "Reservation",
            "NodeNUMAResource",
            "DeviceShare",
            "ElasticQuota",
        ),
        Point.FILTER: (
            *default[Point.FILTER],
            "Reservation",
            "LoadAwareScheduling",
            "NodeNUMAResource",
            "DeviceShare",
        ),
        Point.POST_FILTER: ("Reservation", "Coscheduling", "ElasticQuota"),
        Point.PRE_SCORE: (*default[Point.PRE_SCORE], "Reservation", "Coscheduling"),
        Point.SCORE: (
            *default[Point.SCORE],
            "LoadAwareScheduling",
            "NodeNUMAResource",
            "DeviceShare",
            "Reservation",
            "Coscheduling",
        ),
        Point.RESERVE: (
            "VolumeBinding",
            "Reservation",
            "LoadAwareScheduling",
            "NodeNUMAResource",
            "DeviceShare",
            "Coscheduling",
            "ElasticQuota",
        ),
        Point.PERMIT: ("Coscheduling",),
        Point.PRE_BIND: (
            "VolumeBinding",
            "NodeNUMAResource",
            "DeviceShare",
            "Reservation",
            "Coscheduling",
            "DefaultPreBind",
        ),
        Point.BIND: ("Reservation", "DefaultBinder"),
        Point.POST_BIND: ("Coscheduling",),
    }
    assert found.score_weights["Reservation"] == 5000
    assert found.score_weights["TaintToleration"] == 3


@pytest.mark.parametrize(
    ("point", "plugins", "expected"),
    [
        # default plugins that the point lists too, the other default ones, then the others
        (
            Point.SCORE,
            {"score": enabled("DeviceShare", "ImageLocality", "NodeAffinity")},
            (
                "ImageLocality",
                "NodeAffinity",
                "TaintToleration",
                "NodeResourcesFit",
                "VolumeBinding",
                "PodTopologySpread",
                "InterPodAffinity",
                "NodeResourcesBalancedAllocation",
                "DeviceShare",
            ),
        ),
        # "*" leaves only what the point enables
        (Point.SCORE, {"score": enabled("DeviceShare", disabled=("*",))}, ("DeviceShare",)),
        (Point.RESERVE, {"reserve": enabled(disabled=("*",))}, ()),
        # one plugin goes from one point
        (Point.RESERVE, {"reserve": enabled(disabled=("VolumeBinding",))}, ()),
        (
            Point.PRE_BIND,
            {"reserve": enabled(disabled=("VolumeBinding",))},
            ("VolumeBinding", "DefaultPreBind"),
        ),
        # disabled and enabled: at the end
        (
            Point.PRE_ENQUEUE,
            {"preEnqueue": enabled("SchedulingGates", disabled=("SchedulingGates",))},
            ("DefaultPreemption", "SchedulingGates"),
        ),
        # MultiPoint: a plugin of one's own follows the default ones at all of its points
        (Point.RESERVE, {"multiPoint": enabled("DeviceShare")}, ("VolumeBinding", "DeviceShare")),
        # ... and replaces them where all are disabled
        (
            Point.FILTER,
            {"multiPoint": enabled("PrioritySort", "NodeName", "DefaultBinder", disabled=("*",))},
            ("NodeName",),
        ),
        (
            Point.RESERVE,
            {"multiPoint": enabled("DeviceShare", disabled=("VolumeBinding",))},
            ("DeviceShare",),
        ),
        # a default plugin that MultiPoint lists again keeps its place
        (
            Point.POST_FILTER,
            {"multiPoint": enabled("Coscheduling", "DefaultPreemption")},
            ("DefaultPreemption", "Coscheduling"),
        ),
        # DefaultPreBind
        (Point.PRE_BIND, None, ("VolumeBinding",)),
        (Point.PRE_BIND, {}, ("VolumeBinding", "DefaultPreBind")),
        (Point.PRE_BIND, {"preBind": enabled(disabled=("DefaultPreBind",))}, ("VolumeBinding",)),
        (Point.PRE_BIND, {"preBind": enabled("DeviceShare", disabled=("*",))}, ("DeviceShare",)),
        (
            Point.PRE_BIND,
            {"preBind": enabled("DefaultPreBind", "DeviceShare")},
            ("VolumeBinding", "DefaultPreBind", "DeviceShare"),
        ),
        # what is left out here, and what kube-scheduler no longer has
        (Point.RESERVE, {"reserve": enabled("DynamicResources")}, ("VolumeBinding",)),
        (Point.RESERVE, {"reserve": enabled(disabled=("NodeLabel",))}, ("VolumeBinding",)),
    ],
)
def test_lists_are_merged(point: Point, plugins: Tree | None, expected: tuple[str, ...]) -> None:
    assert at(point, plugins) == expected


@pytest.mark.parametrize(
    ("plugins", "name", "weight"),
    [
        ({"score": enabled("TaintToleration:7")}, "TaintToleration", 7),
        ({"score": enabled("TaintToleration")}, "TaintToleration", 1),
        ({"score": enabled("TaintToleration:0")}, "TaintToleration", 1),
        ({"multiPoint": enabled("TaintToleration:9")}, "TaintToleration", 9),
        ({"multiPoint": enabled("TaintToleration")}, "TaintToleration", 1),
        ({"multiPoint": enabled("DeviceShare:4")}, "DeviceShare", 4),
        (
            {"multiPoint": enabled("DeviceShare:4"), "score": enabled("DeviceShare:6")},
            "DeviceShare",
            6,
        ),
        ({"score": enabled("Reservation:2147483647")}, "Reservation", 2**31 - 1),
        ({"filter": enabled("TaintToleration:5")}, "TaintToleration", 3),
    ],
)
def test_weights(plugins: Tree, name: str, weight: int) -> None:
    assert profile(plugins).score_weights[name] == weight


def test_a_plugin_that_is_left_out_is_named() -> None:
    found = load(file(profiles=[{"plugins": {"filter": enabled("DynamicResources")}}]))
    (notice,) = found.notices
    assert notice.startswith("profiles[0].plugins: DynamicResources is left out")
    assert not load(file()).notices


# --- against the rule, written down step by step -------------------------------------------------


def slowly(point: Point, plugins: Tree) -> list[str]:
    """The reference, one plugin at a time."""
    multi = plugins.get("multiPoint", {})
    off = [each["name"] for each in multi.get("disabled", [])]
    defaults = list(DEFAULT_MULTI_POINT)
    everywhere = [] if "*" in off else [name for name in defaults if name not in off]
    for each in multi.get("enabled", []):
        if each["name"] not in everywhere:
            everywhere.append(each["name"])
    here = plugins.get(point.value, {})
    named = [each["name"] for each in here.get("enabled", [])]
    off = [each["name"] for each in here.get("disabled", [])]
    if "*" in off:
        return named
    result = []
    for name in named:
        if name in everywhere and name not in off:
            result.append(name)
    for name in everywhere:
        if name not in named and name not in off and point in PLUGINS[name].points:
            result.append(name)
    for name in named:
        if name not in result:
            result.append(name)
    return result


def sets(names: list[str]) -> st.SearchStrategy[Tree]:
    some = st.lists(st.sampled_from(names), unique=True, max_size=5)
    off = st.lists(st.sampled_from([*names, "*"]), unique=True, max_size=3)
    return st.builds(lambda on, gone: enabled(*on, disabled=tuple(gone)), some, off)


KEPT = [name for name, plugin in PLUGINS.items() if not plugin.left_out]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_merging_equals_the_rule_applied_one_by_one(data: Any) -> None:
    point = data.draw(st.sampled_from(list(Point)))
    names = [name for name in KEPT if point in PLUGINS[name].points]
    plugins = {"multiPoint": data.draw(sets(KEPT)), point.value: data.draw(sets(names))}
    if errors_of(file(profiles=[{"plugins": plugins}])):
        expected = [slowly(needed, plugins) for needed in (Point.QUEUE_SORT, Point.BIND)]
        assert [] in expected
        return
    found = [name for name in at(point, plugins) if name != "DefaultPreBind"]
    assert found == [name for name in slowly(point, plugins) if name != "DefaultPreBind"]

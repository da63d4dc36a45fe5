"""Files that cannot be used: each mistake is named with its field, and all of them together."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.errors import InputErrors
from apis.fields import get_field, parse_dotted
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.configuration.strict import MOST_PROBLEMS
from tests.cluster.scheduler.configuration.bad_files import BAD, LEASE, extender, plugins
from tests.cluster.scheduler.configuration.files import (
    Tree,
    chart_file,
    chart_profile,
    enabled,
    errors_of,
    fields_of,
    file,
    load,
)


@pytest.mark.parametrize(
    ("tree", "field", "problem"), BAD, ids=[f"{i}-{case[1]}" for i, case in enumerate(BAD)]
)
def test_a_mistake_is_named_with_its_field(tree: Tree, field: str, problem: str) -> None:
    with pytest.raises(InputErrors, match=problem) as caught:
        load(tree)
    (error,) = caught.value.errors
    assert error.field == field
    assert error.obj == "config.yaml"


# A key of a map is shown as a name, and no secret of an extender is shown.
SHOWN_OTHERWISE = {
    ('profiles[0].pluginConfig[0].args.usageThresholds["c p u"]', 1): "c p u",
    ("extenders[0].urlPrefix", "https://user:secret@host/x"): "https://...@host",
    ("extenders[0].tlsConfig.caData", "!"): "(not shown)",
}
# Fields that the file leaves out, or whose value is what is missing in it.
SHOWN_AS_MISSING = {
    "apiVersion": "(absent)",
    "podMaxBackoffSeconds": "10",
    "profiles[1].schedulerName": "",
    "profiles[0].plugins.queueSort": "(none)",
    "profiles[0].plugins.bind": "(none)",
    "profiles[0].pluginConfig[0].args.scoringStrategy.requestedToCapacityRatio.shape": "(absent)",
    "profiles[0].pluginConfig[0].args.defaultingType": "System",
    "extenders[0].weight": "0",
}


@pytest.mark.parametrize(
    ("tree", "field"), [case[:2] for case in BAD], ids=[f"{i}-{c[1]}" for i, c in enumerate(BAD)]
)
def test_a_mistake_shows_the_value_as_the_file_has_it(tree: Tree, field: str) -> None:
    path = parse_dotted(field)
    assert path is not None
    (error,) = errors_of(tree)
    value = get_field(tree, path)
    if value is not None and not isinstance(value, (dict, list)):
        assert error.value == SHOWN_OTHERWISE.get((field, value), str(value))
    elif field in SHOWN_AS_MISSING:
        assert error.value == SHOWN_AS_MISSING[field]


def test_all_mistakes_of_100_profiles_are_named_and_the_good_profiles_are_not() -> None:
    profiles: list[Tree] = []
    expected = []
    bad = [
        (tree, field)
        for tree, field, _ in BAD
        if field.startswith("profiles[0].") and len(tree["profiles"]) == 1
    ]
    for index in range(100):
        profiles.append(chart_profile(f"scheduler-{2 * index}"))
        tree, field = bad[index % len(bad)]
        broken = copy.deepcopy(tree["profiles"][0])
        named = isinstance(broken.get("schedulerName", ""), str)
        profiles.append(
            {"schedulerName": f"scheduler-{2 * index + 1}"} | broken if named else broken
        )
        expected.append(field.replace("profiles[0]", f"profiles[{2 * index + 1}]", 1))
    assert sorted(fields_of(file(profiles=profiles))) == sorted(expected)


def test_100_profiles_are_read() -> None:
    profiles = [chart_profile(f"scheduler-{index}") for index in range(100)]
    found = load(file(profiles=profiles)).profiles
    assert [each.scheduler_name for each in found] == [each["schedulerName"] for each in profiles]


def test_mistakes_in_different_places_are_reported_together() -> None:
    tree = chart_file()
    tree["parallelism"] = 0
    tree["leaderElection"]["renewDeadline"] = "20s"
    tree["profiles"][0]["plugins"]["score"]["enabled"][1]["weight"] = -3
    tree["profiles"][0]["pluginConfig"][1]["args"]["usageThresholds"]["cpu"] = 650
    tree["profiles"][0]["plugins"]["filter"]["enabled"][1]["name"] = "LoadAware"
    tree["extenders"] = [{"urlPrefix": "nowhere"}]
    assert sorted(fields_of(tree)) == [
        "extenders[0].urlPrefix",
        "parallelism",
        "profiles[0].pluginConfig[1].args.usageThresholds.cpu",
        "profiles[0].plugins.filter.enabled[1].name",
        "profiles[0].plugins.score.enabled[1].weight",
    ]
    del tree["parallelism"]
    assert "leaderElection.leaseDuration" in fields_of(tree)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "expected a KubeSchedulerConfiguration"),
        ("[]", "expected a KubeSchedulerConfiguration"),
        ("a: b: c", "line 1"),
        ("a: 1\na: 2", "stands twice"),
        ("a: 1\n---\na: 2", "more than one document"),
        ("[" * 5000, "nested deeper"),
        ("x: [" + "1," * 60_000 + "1]", "more than 50000 values"),
        (
            "a: &a [x, x, x, x, x, x, x, x, x]\n"
            + "\n".join(
                f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]"
                for old, new in zip("abcdefgh", "bcdefghi", strict=True)
            ),
            "more than 50000 values",
        ),
        ("x: " + "y" * (1 << 20), "longer than 1048576 characters"),
        ("x: !!python/object:os.system {}", "is not read here"),
        ('x: "\\ud800"', "invalid Unicode"),
        ("", r"\(whole file\) = '': expected a KubeSchedulerConfiguration"),
        ("{apiVersion: v1, kind: ConfigMap, data: {}}", "in the data of this ConfigMap: mount it"),
        ("\0", "control characters|special characters"),
    ],
)
def test_what_is_no_file_of_this_kind_is_refused_quickly(text: str, problem: str) -> None:
    with pytest.raises(InputErrors, match=problem):
        read_configuration(text, obj="config.yaml")


@pytest.mark.parametrize(
    "tree",
    [
        plugins(filter=enabled(*(f"NodeNam{n}" for n in range(12_000)))),
        plugins(filter=enabled(disabled=tuple(f"NodeNam{n}" for n in range(12_000)))),
        file(profiles=[{"pluginConfig": [{"name": f"DeviceShar{n}"} for n in range(12_000)]}]),
        file(profiles=[{"schedulerNam": "a"}] * 12_000),
        file(extenders=[{"urlPrefi": "a"}] * 12_000),
    ],
    ids=["enabled", "disabled", "pluginConfig", "profiles", "extenders"],
)
def test_after_a_thousand_mistakes_the_rest_is_not_checked(tree: Tree) -> None:
    # Names of several profiles are compared at the end, without any search for similar ones.
    found = [each for each in errors_of(tree) if not each.field.endswith("schedulerName")]
    assert MOST_PROBLEMS <= len(found) < MOST_PROBLEMS + 10


def test_keys_that_are_no_text_are_unknown_fields() -> None:
    text = json.dumps(file())[:-1] + ", 7: 1, true: 2, profiles: [{1: 2, plugins: {3: {}}}]}"
    with pytest.raises(InputErrors) as caught:
        read_configuration(text, obj="config.yaml")
    assert len(caught.value.errors) >= 3


def test_key_data_of_extenders_is_not_shown() -> None:
    (error,) = errors_of(extender(tlsConfig={"keyData": "c2VjcmV0!", "certFile": "/c"}))
    assert "c2VjcmV0" not in str(error)


# --- anything in any place -----------------------------------------------------------------------

WORDS = st.text("ab1 .*#:-{}[]\"'é\U0001f600\n", max_size=6)
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=True)
    | WORDS
    | st.sampled_from(["*", "NodeName", "15s", "LeastAllocated", "cpu"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(WORDS | st.sampled_from(["name", "enabled"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(tree: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    found = [path] if path else []
    members = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for step, member in members if isinstance(tree, dict | list) else ():
        found += (
            places(member, (*path, step)) if isinstance(member, dict | list) else [(*path, step)]
        )
    return found


def with_junk(tree: Tree, path: tuple[str | int, ...], junk: Any) -> Tree:
    changed = copy.deepcopy(tree)
    part: Any = changed
    for step in path[:-1]:
        part = part[step]
    part[path[-1]] = junk
    return changed


WHOLE = file(
    clientConnection={"kubeconfig": "/k", "qps": 10, "burst": 20},
    leaderElection=LEASE | {"leaderElect": True},
    parallelism=16,
    podInitialBackoffSeconds=1,
    podMaxBackoffSeconds=10,
    profiles=[chart_profile("one"), chart_profile("two")],
    extenders=[
        {
            "urlPrefix": "https://extender/x",
            "prioritizeVerb": "rank",
            "weight": 5,
            "managedResources": [{"name": "a.io/x", "ignoredByScheduler": True}],
            "tlsConfig": {"caData": "Y2E="},
        }
    ],
)
PLACES = places(WHOLE)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(PLACES), JUNK)
def test_junk_in_one_place_costs_that_place_alone(path: tuple[str | int, ...], junk: Any) -> None:
    for error in errors_of(with_junk(WHOLE, path, junk)):
        named = parse_dotted(error.field)
        if path[0] in ("apiVersion", "kind"):
            assert error.field == path[0]
        elif path[0] in ("profiles", "extenders") and len(path) > 1 and named:
            # The mistake may be named where it contradicts something else of the same part, and
            # two profiles contradict each other by their names.
            assert named[0] == path[0] or path[0] == "extenders"
            assert named[1:2] == path[1:2] or named[-1] in ("schedulerName", "(whole file)")


@settings(max_examples=100, deadline=None)
@given(JUNK)
def test_junk_as_a_file_is_refused(junk: Any) -> None:
    assert errors_of(junk)


def test_a_password_in_a_url_is_not_repeated_in_the_error() -> None:
    (error,) = errors_of(extender(urlPrefix="https://user:secret@host:8443/x"))
    assert "https://...@host:8443" in str(error)
    assert "secret" not in str(error)

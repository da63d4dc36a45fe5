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
from tests.cluster.scheduler.configuration.bad_files import (
    BAD,
    LEASE,
    configured,
    extender,
    plugins,
)
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


_ARGS = "profiles[0].pluginConfig[0].args"
_STRATEGY = {"type": "MostAllocated", "resources": [{"name": "a b"}]}


@pytest.mark.parametrize(
    ("plugin", "members", "fields"),
    [
        ("LoadAwareScheduling", {"usageThresholds": {"a b": 1}}, ['usageThresholds["a b"]']),
        (
            "LoadAwareScheduling",
            {"resourceWeights": {"a b": 1}, "estimatedScalingFactors": {"a b": 1}},
            ['resourceWeights["a b"]', 'estimatedScalingFactors["a b"]'],
        ),
        (
            "LoadAwareScheduling",
            {"prodUsageThresholds": {"a b": 1}},
            ['prodUsageThresholds["a b"]'],
        ),
        (
            "LoadAwareScheduling",
            {"aggregated": {"usageThresholds": {"a b": 1}}},
            ['aggregated.usageThresholds["a b"]'],
        ),
        (
            "LoadAwareScheduling",
            {"supportedResources": ["cpu", "a b"]},
            ["supportedResources[1]"],
        ),
        ("ElasticQuota", {"defaultQuotaGroupMax": {"a b": 1}}, ['defaultQuotaGroupMax["a b"]']),
        ("ElasticQuota", {"systemQuotaGroupMax": {"a b": 1}}, ['systemQuotaGroupMax["a b"]']),
        (
            "NodeResourcesFitPlus",
            {"resources": {"a b": {"type": "MostAllocated", "weight": 1}}},
            ['resources["a b"]'],
        ),
        ("ScarceResourceAvoidance", {"resources": ["cpu", "a b"]}, ["resources[1]"]),
        (
            "DeviceShare",
            {"gpuSharedResourceTemplatesConfig": {"matchedResources": ["a b"]}},
            ["gpuSharedResourceTemplatesConfig.matchedResources[0]"],
        ),
        ("DeviceShare", {"scoringStrategy": _STRATEGY}, ["scoringStrategy.resources[0].name"]),
        ("NodeNUMAResource", {"scoringStrategy": _STRATEGY}, ["scoringStrategy.resources[0].name"]),
        (
            "NodeNUMAResource",
            {"numaScoringStrategy": _STRATEGY},
            ["numaScoringStrategy.resources[0].name"],
        ),
        ("NodeResourcesFit", {"scoringStrategy": _STRATEGY}, ["scoringStrategy.resources[0].name"]),
        (
            "NodeResourcesBalancedAllocation",
            {"resources": [{"name": "cpu"}, {"name": "a b"}]},
            ["resources[1].name"],
        ),
        (
            "NodeResourcesFit",
            {"ignoredResourceGroups": ["ok", "a b"]},
            ["ignoredResourceGroups[1]"],
        ),
        ("NodeResourcesFit", {"ignoredResources": ["cpu", "a b"]}, ["ignoredResources[1]"]),
        ("Reservation", {"ignoredResourceGroups": ["a.io", "a/b"]}, ["ignoredResourceGroups[1]"]),
        ("Reservation", {"ignoredResources": ["a.io/x", "a b"]}, ["ignoredResources[1]"]),
        (
            "Reservation",
            {"preAllocationConfig": {"clusterPriorityAnnotationKey": "a b"}},
            ["preAllocationConfig.clusterPriorityAnnotationKey"],
        ),
        (
            "Reservation",
            {"minCandidateNodesPercentage": 0, "minCandidateNodesAbsolute": 0},
            ["minCandidateNodesPercentage"],
        ),
    ],
)
def test_every_name_of_a_resource_is_checked_where_it_stands(
    plugin: str, members: Tree, fields: list[str]
) -> None:
    errors = errors_of(configured(plugin, **members))
    assert [error.field for error in errors] == [f"{_ARGS}.{field}" for field in fields]
    named = [error.value for error in errors if error.value != "0"]
    assert set(named) <= {"a b", "a/b"}


def _affinity(*terms: Tree, preferred: tuple[Tree, ...] = ()) -> Tree:
    required = {"nodeSelectorTerms": list(terms)}
    return {
        "addedAffinity": {
            **({"requiredDuringSchedulingIgnoredDuringExecution": required} if terms else {}),
            "preferredDuringSchedulingIgnoredDuringExecution": list(preferred),
        }
    }


def _expression(operator: str, *values: str) -> Tree:
    return {"matchExpressions": [{"key": "a", "operator": operator, "values": list(values)}]}


def _field(key: str, operator: str, *values: str) -> Tree:
    return {"matchFields": [{"key": key, "operator": operator, "values": list(values)}]}


@pytest.mark.parametrize(
    ("plugin", "members"),
    [
        ("DefaultPreemption", {"minCandidateNodesPercentage": 0, "minCandidateNodesAbsolute": 1}),
        ("DefaultPreemption", {"minCandidateNodesPercentage": 1, "minCandidateNodesAbsolute": 0}),
        ("Reservation", {"minCandidateNodesPercentage": 0, "minCandidateNodesAbsolute": 1}),
        # On nodes all names can be ignored, in reservations those of extended resources.
        ("NodeResourcesFit", {"ignoredResources": ["cpu"], "ignoredResourceGroups": ["k8s"]}),
        ("NodeResourcesFit", {"ignoredResourceGroups": ["kubernetes.io"]}),
        ("Reservation", {"ignoredResources": ["a.io/x"], "ignoredResourceGroups": ["a.io"]}),
        ("ElasticQuota", {"defaultQuotaGroupMax": {"cpu": 0}}),
        (
            "PodTopologySpread",
            {
                "defaultingType": "List",
                "defaultConstraints": [
                    {"maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": when}
                    for key in ("zone", "rack")
                    for when in ("DoNotSchedule", "ScheduleAnyway")
                ],
            },
        ),
        ("NodeAffinity", _affinity(_expression("In", "x", "y"), _expression("NotIn", "x"))),
        ("NodeAffinity", _affinity(_expression("Exists"), _expression("DoesNotExist"))),
        ("NodeAffinity", _affinity(_expression("Gt", "-1"), _expression("Lt", "2"))),
        ("NodeAffinity", _affinity(_field("metadata.name", "NotIn", "n"))),
        (
            "NodeAffinity",
            _affinity(
                preferred=tuple(
                    {"weight": weight, "preference": _expression("Exists")} for weight in (1, 100)
                )
            ),
        ),
        (
            "NodeResourcesFit",
            {
                "scoringStrategy": {
                    "type": "RequestedToCapacityRatio",
                    "requestedToCapacityRatio": {
                        "shape": [{"utilization": n, "score": 10 - n} for n in (0, 1, 10)]
                    },
                }
            },
        ),
    ],
)
def test_what_stands_at_a_bound_can_be_used(plugin: str, members: Tree) -> None:
    assert errors_of(configured(plugin, **members)) == ()


@pytest.mark.parametrize(
    ("term", "field", "problem"),
    [
        (_expression("NotIn"), "matchExpressions[0].values", "NotIn takes at least one value"),
        (_expression("DoesNotExist", "x"), "matchExpressions[0].values", "takes no values"),
        (_expression("Lt"), "matchExpressions[0].values", "Lt takes one value"),
        (_expression("Gt", "1", "2"), "matchExpressions[0].values", "Gt takes one value"),
        (_expression("In", "x", "a b"), "matchExpressions[0].values[1]", "letters"),
        (_field("metadata.name", "Exists", "n"), "matchFields[0].operator", "one of In, NotIn"),
        (_field("metadata.name", "In"), "matchFields[0].values", "expected one name"),
        (_field("metadata.name", "In", "n", "m"), "matchFields[0].values", "expected one name"),
    ],
)
@pytest.mark.parametrize("preferred", [False, True])
def test_a_term_is_checked_as_that_of_a_pod(
    term: Tree, field: str, problem: str, preferred: bool
) -> None:
    weighted = ({"weight": 100, "preference": term},)
    members = _affinity(preferred=weighted) if preferred else _affinity(term)
    errors = errors_of(
        file(profiles=[{"pluginConfig": [{"name": "NodeAffinity", "args": members}]}])
    )
    place = (
        "preferredDuringSchedulingIgnoredDuringExecution[0].preference"
        if preferred
        else "requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0]"
    )
    assert [error.field for error in errors] == [f"{_ARGS}.addedAffinity.{place}.{field}"]
    assert problem in errors[0].problem


@pytest.mark.parametrize("weight", [0, 101])
def test_the_weight_of_a_preferred_term_has_bounds(weight: int) -> None:
    members = _affinity(preferred=({"weight": weight, "preference": _expression("Exists")},))
    errors = errors_of(
        file(profiles=[{"pluginConfig": [{"name": "NodeAffinity", "args": members}]}])
    )
    assert [error.field.rpartition(".")[2] for error in errors] == ["weight"]


@pytest.mark.parametrize(
    "url", ["ftp://host/", "http://", "http:///path", "//host/", "host", "", "file:///x"]
)
def test_an_extender_needs_a_url_with_scheme_and_host(url: str) -> None:
    (error,) = errors_of(extender(urlPrefix=url))
    assert (error.field, error.value) == ("extenders[0].urlPrefix", url)


@pytest.mark.parametrize(
    ("settings_of_tls", "field"),
    [
        ({"insecure": True, "caData": "QQ=="}, "insecure"),
        ({"keyFile": "/k"}, "certFile"),
        ({"certData": "QQ=="}, "certFile"),
        ({"keyData": "QQ=="}, "certFile"),
        ({"certData": "!", "keyFile": "/k"}, "certData"),
        ({"certFile": "/c", "keyData": "!"}, "keyData"),
        ({"insecure": True}, None),
        ({"caFile": "/ca", "certData": "QQ==", "keyFile": "/k"}, None),
        ({"caData": "QQ==", "certFile": "/c", "keyData": "QQ=="}, None),
    ],
)
def test_the_certificates_of_an_extender_fit_together(
    settings_of_tls: Tree, field: str | None
) -> None:
    found = fields_of(extender(tlsConfig=settings_of_tls))
    assert found == ([] if field is None else [f"extenders[0].tlsConfig.{field}"])

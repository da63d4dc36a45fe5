"""What keys of labels in affinity terms mean for a pod that no API server made."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from apis.scheduling_pod import Affinity, PodAffinityTerm
from cluster.scheduler.sources.label_keys import with_label_keys

_LABELS = {"version": "1", "tier": "a"}


def _term(**members: Any) -> dict[str, Any]:
    return {"topologyKey": "zone", "labelSelector": {"matchLabels": {"app": "web"}}, **members}


def _affinity(kind: str, term: dict[str, Any], *, preferred: bool) -> Affinity:
    rule = (
        {"preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 3, "podAffinityTerm": term}
        ]}
        if preferred
        else {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    )  # fmt: skip
    return msgspec.convert({kind: rule}, Affinity)


def _read(affinity: Affinity, kind: str, *, preferred: bool) -> PodAffinityTerm:
    part = affinity.pod_affinity if kind == "podAffinity" else affinity.pod_anti_affinity
    assert part is not None
    if not preferred:
        (term,) = part.required
        return term
    (weighted,) = part.preferred
    assert weighted.weight == 3
    return weighted.pod_affinity_term


@pytest.mark.parametrize("kind", ["podAffinity", "podAntiAffinity"])
@pytest.mark.parametrize("preferred", [False, True])
@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({}, []),
        ({"matchLabelKeys": ["version"]}, [("version", "In", ("1",))]),
        ({"mismatchLabelKeys": ["tier"]}, [("tier", "NotIn", ("a",))]),
        (
            {"matchLabelKeys": ["version", "absent"], "mismatchLabelKeys": ["absent", "tier"]},
            [("version", "In", ("1",)), ("tier", "NotIn", ("a",))],
        ),
    ],
)
def test_keys_become_demands_on_the_pods_own_values(
    kind: str,
    preferred: bool,
    members: dict[str, Any],
    expected: list[tuple[str, str, tuple[str, ...]]],
) -> None:
    own = {"key": "own", "operator": "Exists"}
    selector = {"matchLabels": {"app": "web"}, "matchExpressions": [own]}
    given = _affinity(kind, _term(labelSelector=selector, **members), preferred=preferred)
    found = _read(with_label_keys(given, _LABELS), kind, preferred=preferred)
    assert found.topology_key == "zone"
    assert found.label_selector is not None
    assert found.label_selector.match_labels == {"app": "web"}
    first, *more = found.label_selector.match_expressions
    assert (first.key, first.operator) == ("own", "Exists")
    assert [(each.key, each.operator, each.values) for each in more] == expected


def test_a_term_without_a_selector_selects_nothing_and_stays_so() -> None:
    given = _affinity(
        "podAffinity", _term(labelSelector=None, matchLabelKeys=["version"]), preferred=False
    )
    found = with_label_keys(given, _LABELS)
    assert found.pod_affinity == given.pod_affinity
    # Nothing is demanded of other kinds.
    assert found.pod_anti_affinity is not None
    assert (found.pod_anti_affinity.required, found.pod_anti_affinity.preferred) == ((), ())

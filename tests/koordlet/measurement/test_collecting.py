"""Following the groups that are measured from one list of targets to the next."""

from __future__ import annotations

from koordlet.measurement.collecting import (
    ContainerTarget,
    GroupTarget,
    PodTarget,
    Targets,
    followed,
)


def test_known_values_stay_new_ones_are_made_and_the_others_are_closed() -> None:
    closed: list[str] = []
    found = followed({"a": "known a", "b": "known b"}, ["c", "a"], str.upper, closed.append)
    assert list(found.items()) == [("c", "C"), ("a", "known a")]
    assert closed == ["known b"]


def test_a_key_that_is_wanted_twice_has_one_value() -> None:
    made: list[str] = []

    def make(key: str) -> str:
        made.append(key)
        return key

    assert followed({}, ["a", "a"], make, lambda _: None) == {"a": "a"}
    assert made == ["a"]


def test_groups_are_pods_and_containers_with_a_cgroup() -> None:
    targets = Targets(
        pods=(
            PodTarget(
                "u1", "/pod1", (ContainerTarget("c1", "/pod1/c1"), ContainerTarget("c2", ""))
            ),
            PodTarget("u2", "", (ContainerTarget("c3", "/elsewhere/c3"),)),
        )
    )
    assert list(targets.groups) == [
        GroupTarget(True, "u1", "/pod1"),
        GroupTarget(False, "c1", "/pod1/c1"),
        GroupTarget(False, "c3", "/elsewhere/c3"),
    ]

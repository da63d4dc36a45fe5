"""The capability table, as a specification."""

from __future__ import annotations

import pytest

from apis.errors import InputError
from linux.resources import Resource
from nri_plugin.capabilities import (
    Generation,
    RuntimeKind,
    Version,
    parse_version,
    runtime_profile,
)
from nri_plugin.events import SUBSCRIBED, Event, parse_events, subscription


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("v1.7.22", (1, 7, 22)),
        ("1.7.24~ds1", (1, 7, 24)),
        ("v1.7.22-k3s1", (1, 7, 22)),
        ("2.4.0-beta.0", (2, 4, 0)),
        ("1.31", (1, 31, 0)),
        ("  2.1.9+unknown", (2, 1, 9)),
        ("", None),
        ("(devel)", None),
        ("version 2", None),
        ("9999999.1.1", None),
    ],
)
def test_versions_are_read_as_distributions_write_them(text: str, version: Version | None) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize(
    ("name", "version", "nri", "generation"),
    [
        ("containerd", "v1.7.0", (0, 3, 0), Generation.A),
        ("containerd", "1.7.24~ds1", (0, 6, 1), Generation.A),
        ("containerd", "v1.7.25", (0, 6, 1), Generation.A),
        ("containerd", "v1.7.26", (0, 8, 0), Generation.B),
        ("containerd", "v2.0.0", (0, 8, 0), Generation.B),
        ("containerd", "2.1.9", (0, 8, 0), Generation.B),
        ("containerd", "v2.2.0", (0, 10, 0), Generation.C),
        ("containerd", "v2.2.7", (0, 11, 0), Generation.C),
        ("containerd", "v2.3.4", (0, 12, 0), Generation.D),
        ("containerd", "v3.0.0", (0, 12, 1), Generation.D),
        ("containerd", "v1.6.9", (0, 3, 0), Generation.A),
        ("cri-o", "1.26.0", (0, 2, 0), Generation.A),
        ("cri-o", "1.31.2", (0, 6, 1), Generation.A),
        ("cri-o", "1.33.0", (0, 9, 0), Generation.B),
        ("cri-o", "1.35.1", (0, 11, 0), Generation.C),
        ("containerd", "unreadable", (0, 3, 0), Generation.A),
        ("other", "9.9.9", (0, 3, 0), Generation.A),
    ],
)
def test_the_nri_version_follows_from_the_runtimes(
    name: str, version: str, nri: Version, generation: Generation
) -> None:
    profile = runtime_profile(name, version)
    assert (profile.nri, profile.generation) == (nri, generation)
    assert not profile.nri_reported


@pytest.mark.parametrize(
    ("sent", "nri", "reported"),
    [
        ("v0.12.2", (0, 12, 2), True),
        ("v0.12.1", (0, 12, 1), True),
        ("v0.12.1-0.20260801000000-abcdefabcdef", (0, 12, 0), True),
        ("v0.12.0", (0, 12, 0), True),
        ("(devel)", (0, 12, 0), False),
        ("0.0.0-unknown", (0, 12, 0), False),
        ("", (0, 12, 0), False),
    ],
)
def test_an_nri_version_that_the_runtime_sent_counts_before_an_inferred_one(
    sent: str, nri: Version, reported: bool
) -> None:
    profile = runtime_profile("containerd", "v2.3.0", nri_version=sent)
    assert (profile.nri, profile.nri_reported) == (nri, reported)


@pytest.mark.parametrize(
    ("told", "served"),
    [
        ("v0.12.5", True),
        ("v0.12.4", True),
        ("v0.12.4-rc.1", False),
        ("v0.12.3", False),
        ("", False),
    ],
)
def test_only_a_known_nri_version_serves_failure_policies(told: str, served: bool) -> None:
    assert runtime_profile("containerd", "v9.0.0", nri_version=told).failure_policy is served


@pytest.mark.parametrize(
    ("name", "version", "at_once"),
    [
        ("containerd", "1.7.25", True),
        ("cri-o", "1.31.0", True),
        ("containerd", "1.7.26", False),
        ("containerd", "", False),
        ("acme", "1.0.0", False),
    ],
)
def test_which_runtimes_send_their_list_right_after_configure(
    name: str, version: str, at_once: bool
) -> None:
    assert runtime_profile(name, version).lists_at_once is at_once


@pytest.mark.parametrize(
    ("name", "version", "oom_score_adj"),
    [
        ("containerd", "v1.7.25", False),
        ("containerd", "v1.7.26", True),
        ("containerd", "v2.0.0", True),
        ("cri-o", "1.31.0", False),
        ("cri-o", "1.33.0", True),
        ("somebody", "v2.0.0", False),
    ],
)
def test_where_a_creation_may_carry_oom_score_adj(
    name: str, version: str, oom_score_adj: bool
) -> None:
    profile = runtime_profile(name, version)
    assert (Resource.OOM_SCORE_ADJ in profile.creation) is oom_score_adj
    assert Resource.OOM_SCORE_ADJ not in profile.update


def test_what_no_runtime_takes_through_nri() -> None:
    profile = runtime_profile("containerd", "v2.3.0", cgroup_version=2)
    for resource in (Resource.CPU_BVT, Resource.CORE_SCHED_COOKIE, Resource.CPU_CFS_BURST):
        assert resource not in profile.creation
    for resource in (Resource.RESCTRL_GROUP, Resource.ENV, Resource.DEVICE, Resource.MOUNT):
        assert resource in profile.creation
        assert resource not in profile.update


def test_unified_values_exist_on_cgroup_v2_only() -> None:
    for version, there in ((1, False), (2, True)):
        profile = runtime_profile("containerd", "v2.1.0", cgroup_version=version)
        assert (Resource.MEMORY_MIN in profile.creation) is there
        assert (Resource.MEMORY_HIGH in profile.update) is there


def test_time_outs_that_the_runtime_does_not_name_are_the_defaults() -> None:
    profile = runtime_profile("containerd", "v1.7.20")
    assert (profile.request_timeout_s, profile.registration_timeout_s) == (2.0, 5.0)
    told = runtime_profile("containerd", "v2.1.0", request_timeout_ms=4500)
    assert told.request_timeout_s == 4.5


def test_old_containerd_and_unknown_runtimes_are_warned_about() -> None:
    assert "1.7.16" in runtime_profile("containerd", "v1.7.15").warnings[0]
    assert runtime_profile("containerd", "v1.7.16").warnings == ()
    assert runtime_profile("CRI-O", "1.33.0").kind is RuntimeKind.CRIO
    assert "not known" in runtime_profile("podman", "5").warnings[0]


def test_a_subscription_is_never_everything() -> None:
    for valid in (0x7FF, 0x3FFF):
        assert subscription((), valid) != 0
        assert subscription({Event.VALIDATE_CONTAINER_ADJUSTMENT}, valid) & 0x2000 == 0
        assert subscription(Event, valid) & ~valid == 0
        assert subscription(SUBSCRIBED, valid) & Event.CREATE_CONTAINER.bit


@pytest.mark.parametrize(
    ("text", "events"),
    [
        ("RunPodSandbox, createcontainer", {Event.RUN_POD_SANDBOX, Event.CREATE_CONTAINER}),
        (
            "pod",
            {
                Event.RUN_POD_SANDBOX,
                Event.STOP_POD_SANDBOX,
                Event.REMOVE_POD_SANDBOX,
                Event.UPDATE_POD_SANDBOX,
                Event.POST_UPDATE_POD_SANDBOX,
            },
        ),
        ("all", set(Event) - {Event.VALIDATE_CONTAINER_ADJUSTMENT}),
    ],
)
def test_event_names_in_text(text: str, events: set[Event]) -> None:
    assert parse_events(text, obj="x") == events


@pytest.mark.parametrize("text", ["", "create container", "all,,pod"])
def test_event_names_that_do_not_exist_are_named(text: str) -> None:
    with pytest.raises(InputError, match="is not an NRI event"):
        parse_events(text, obj="x")

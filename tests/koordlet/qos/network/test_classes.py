"""The traffic classes that a NodeSLO and pods ask for, as tables and properties."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from apis.errors import InputErrors
from apis.keys import ANNOTATION_NETWORK_QOS, LABEL_QOS_CLASS
from apis.qos import KubeQoS
from hooks.subject import Pod, make_pod
from koordlet.qos.network.classes import (
    BE,
    LS,
    SYSTEM,
    Line,
    NetworkClasses,
    PodOnNetwork,
    name_of,
    network_classes,
)
from linux.htb import HtbClass, ticks
from linux.packet_classes import Group
from tests.hooks.making import slo

_ETH0 = Line("eth0", 0, 1500)
_OWN = r'{"ingressLimit":"10M","egressLimit":"8M"}'


def _pod(uid: str, qos: str = "LS", *, limits: str | None = None, created_at: float = 1.0) -> Pod:
    return make_pod(
        namespace="default",
        name=uid,
        uid=uid,
        labels={LABEL_QOS_CLASS: qos} if qos else {},
        annotations={} if limits is None else {ANNOTATION_NETWORK_QOS: limits},
        kube_qos=KubeQoS.BURSTABLE,
        phase="Running",
        created_at=created_at,
    )


def _on(pod: Pod, *addresses: str) -> PodOnNetwork:
    return PodOnNetwork(pod, addresses)


def _of(
    *pods: PodOnNetwork,
    total: str = "1G",
    line: Line = _ETH0,
    ls: dict[str, Any] | None = None,
    be: dict[str, Any] | None = None,
) -> NetworkClasses:
    classes = {
        f"{name}Class": {"networkQOS": {"enable": True} | qos}
        for name, qos in (("ls", ls), ("be", be))
        if qos is not None
    }
    spec = {
        "systemStrategy": {"totalNetworkBandwidth": total},
        "resourceQOSStrategy": classes,
    }
    return network_classes(slo(spec), pods, line)


def _rates(wanted: NetworkClasses) -> dict[int, tuple[int, int, int]]:
    """minor -> parent, rate and ceil in bytes per second."""
    return {each.minor: (each.parent, each.rate, each.ceil) for each in wanted.classes}


def test_the_tree_of_classes() -> None:
    wanted = _of(
        ls={"egressRequest": 40, "egressLimit": 90}, be={"egressRequest": "80M", "egressLimit": 50}
    )
    assert _rates(wanted) == {
        0x01: (0x00, 125_000_000, 125_000_000),
        0x10: (0x01, 65_000_000, 125_000_000),
        0x18: (0x10, 1_000, 125_000_000),
        0x20: (0x01, 50_000_000, 112_500_000),
        0x28: (0x20, 1_000, 112_500_000),
        0x30: (0x01, 10_000_000, 62_500_000),
        0x38: (0x30, 1_000, 62_500_000),
    }
    prios = {each.minor: each.prio for each in wanted.classes if each.quantum}
    assert prios == {SYSTEM: 1, LS: 2, BE: 3}


def test_a_class_that_is_not_enabled_may_use_the_line_and_has_nothing_for_sure() -> None:
    assert _rates(_of())[0x30] == (0x01, 1_000, 125_000_000)
    assert _rates(_of(be={"enable": False, "egressLimit": 5}))[0x30] == (1, 1_000, 125_000_000)


def test_the_line_counts_where_the_nodeslo_sets_no_bandwidth() -> None:
    wanted = _of(total="0", line=Line("eth0", 8_000_000, 1500), be={"egressLimit": 25})
    assert wanted.bits == 8_000_000
    assert _rates(wanted)[BE][2] == 250_000


@pytest.mark.parametrize(
    ("classes", "total", "problem"),
    [
        ({}, "0", r"^NodeSLO: .*totalNetworkBandwidth.*eth0 does not report its speed"),
        (
            {"be": {"egressRequest": 50, "egressLimit": 20}},
            "1G",
            r"beClass\.networkQOS\.egressRequest.*500000000.*the egressLimit of 200000000",
        ),
        (
            {"ls": {"egressRequest": 60}, "be": {"egressRequest": 50}},
            "1G",
            r"beClass\.networkQOS\.egressRequest.*lsClass' 600000000 more than 1000000000",
        ),
        ({"ls": {"egressLimit": "2G"}}, "1G", r"lsClass\.networkQOS\.egressLimit"),
    ],
)
def test_a_nodeslo_that_cannot_be_used(
    classes: dict[str, dict[str, Any]], total: str, problem: str
) -> None:
    with pytest.raises(InputErrors, match=problem):
        _of(total=total, **classes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("qos", "minor"),
    [("LSE", LS), ("LSR", LS), ("LS", LS), ("BE", BE), ("SYSTEM", None), ("", None)],
)
def test_pods_by_their_class(qos: str, minor: int | None) -> None:
    wanted = _of(_on(_pod("a", qos), "10.0.0.1", "fd00::1"))
    assert wanted.members == ({"10.0.0.1": minor, "fd00::1": minor} if minor is not None else {})


def test_a_pod_with_a_limit_has_a_class_below_its_own() -> None:
    wanted = _of(_on(_pod("a", "BE", limits=_OWN), "10.0.0.1"), be={"egressLimit": "400M"})
    minor = wanted.members["10.0.0.1"]
    assert _rates(wanted)[minor] == (0x30, 1_000, 1_000_000)
    capped = _of(_on(_pod("a", "BE", limits=_OWN), "10.0.0.1"), be={"egressLimit": "4M"})
    assert _rates(capped)[minor] == (0x30, 1_000, 500_000)


@pytest.mark.parametrize(
    "pod",
    [
        _on(replace(_pod("a", "BE", limits=_OWN), host_network=True), "192.0.2.1"),
        _on(replace(_pod("a", "BE", limits=_OWN), phase="Succeeded"), "10.0.0.1"),
        _on(_pod("a", "BE", limits=_OWN)),
    ],
    ids=["the node's network", "ended", "without an address"],
)
def test_pods_without_packets_of_their_own(pod: PodOnNetwork) -> None:
    assert _of(pod) == _of()


@pytest.mark.parametrize("limits", ['{"egressLimit":"0"}', '{"ingressLimit":"5M"}', "{}"])
def test_no_limit_means_the_class_of_the_others(limits: str) -> None:
    assert _of(_on(_pod("a", "BE", limits=limits), "10.0.0.1")).members == {"10.0.0.1": BE}


@pytest.mark.parametrize(
    "limits",
    ['{"egressLimit":"much"}', '{"egressLimit":[],"ingressLimit":"x"}', '{"egressLimit"', "[]"],
)
def test_a_bad_annotation_costs_that_pod_its_limit_only(limits: str) -> None:
    bad = _on(_pod("a", "BE", limits=limits), "10.0.0.1")
    wanted = _of(bad, _on(_pod("b", "LS"), "10.0.0.2"))
    assert wanted.members == {"10.0.0.1": BE, "10.0.0.2": LS}
    (fault,) = wanted.faults
    assert "default/a" in str(fault) and "networkQOS" in str(fault)


def test_of_two_pods_with_one_address_the_newest_has_it() -> None:
    pods = [
        _on(_pod("old", "LS", created_at=1.0), "10.0.0.1"),
        _on(_pod("new", "BE", created_at=2.0), "10.0.0.1"),
    ]
    assert _of(*pods).members == _of(*reversed(pods)).members == {"10.0.0.1": BE}


def test_a_pod_on_the_nodes_network_is_classified_by_its_group() -> None:
    shared = replace(_pod("a", "BE"), host_network=True)
    limited = replace(_pod("b", "BE", limits=_OWN), host_network=True)
    wanted = _of(
        PodOnNetwork(shared, ("192.0.2.1",), Group(3, 7)),
        PodOnNetwork(limited, ("192.0.2.1",), Group(3, 8)),
    )
    (own,) = set(wanted.members.values()) - {BE}
    assert wanted.members == {Group(3, 7): BE, Group(3, 8): own}
    assert _rates(wanted)[own] == (0x30, 1_000, 1_000_000)


def test_texts_that_are_no_address_of_a_pod_are_left_out() -> None:
    wanted = _of(_on(_pod("a"), "", "10.0.0.1/8", "0.0.0.0", "127.0.0.1", "FD00::01", "nonsense"))
    assert wanted.members == {"fd00::1": LS}


def test_addresses_are_those_that_the_kernel_can_hold() -> None:
    """One that it cannot would keep the classes of all pods from being applied."""
    wanted = _of(_on(_pod("a"), "fe80::1%eth0", "::ffff:10.0.0.9", "::ffff:127.0.0.1"))
    assert wanted.members == {"10.0.0.9": LS}


def test_a_class_of_many_pods_has_more_turns() -> None:
    quanta = []
    for count in (1, 2, 40):
        pods = [_on(_pod(f"p{at}"), f"10.0.0.{at}") for at in range(count)]
        quanta.append(next(each.quantum for each in _of(*pods).classes if each.minor == LS))
    assert quanta == [15_000, 30_000, 240_000]


def test_a_pod_with_a_class_of_its_own_has_one_turn_and_the_priority_of_its_class() -> None:
    pods = [_on(_pod(f"p{at}", "BE", limits=_OWN), f"10.0.0.{at}") for at in range(3)]
    wanted = _of(*pods, _on(_pod("free", "BE"), "10.0.1.1"))
    own = [each for each in wanted.classes if each.minor >= 0x100]
    assert [(each.quantum, each.prio) for each in own] == [(15_000, 3)] * 3
    (shared,) = (each for each in wanted.classes if each.minor == BE)
    assert shared.quantum == 15_000, "pods with a class of their own send in that one"


def test_a_turn_is_never_less_than_a_frame() -> None:
    wanted = _of(line=Line("lo", 0, 65_536))
    assert {each.quantum for each in wanted.classes} == {0, 65_554}


def test_a_limit_is_never_less_than_a_connection_needs_to_stay_alive() -> None:
    wanted = _of(_on(_pod("a", "BE", limits='{"egressLimit":"100"}'), "10.0.0.1"))
    assert _rates(wanted)[wanted.members["10.0.0.1"]] == (0x30, 1_000, 1_000)
    assert _rates(_of(be={"egressLimit": "100"}))[BE] == (0x30, 1_000, 1_000)


def test_a_guarantee_may_reach_the_limit_and_all_of_them_the_line() -> None:
    wanted = _of(
        ls={"egressRequest": 60, "egressLimit": 60}, be={"egressRequest": 40, "egressLimit": 40}
    )
    assert _rates(wanted)[0x20] == (0x1, 75_000_000, 75_000_000)
    assert _rates(wanted)[0x30] == (0x1, 50_000_000, 50_000_000)
    assert _rates(wanted)[0x10] == (0x1, 1_000, 125_000_000)


def test_every_guarantee_that_cannot_be_kept_is_named() -> None:
    with pytest.raises(InputErrors) as caught:
        _of(
            ls={"egressRequest": 70, "egressLimit": 10}, be={"egressRequest": 50, "egressLimit": 40}
        )
    field = "spec.resourceQOSStrategy.{}Class.networkQOS.egressRequest"
    assert [(one.obj, one.field, one.value) for one in caught.value.errors] == [
        ("NodeSLO", field.format("ls"), "700000000"),
        ("NodeSLO", field.format("be"), "500000000"),
        ("NodeSLO", field.format("be"), "500000000"),
    ]


@pytest.mark.parametrize("address", ["224.0.0.1", "ff02::1", "::1", "::", "127.0.0.9"])
def test_an_address_that_no_pod_can_have_is_left_out(address: str) -> None:
    assert _of(_on(_pod("a"), address, "10.0.0.1")).members == {"10.0.0.1": LS}


def test_of_two_pods_of_one_moment_with_one_address_the_last_by_uid_has_it() -> None:
    pods = [_on(_pod("a", "LS"), "10.0.0.1"), _on(_pod("b", "BE"), "10.0.0.1")]
    assert _of(*pods).members == _of(*reversed(pods)).members == {"10.0.0.1": BE}


def test_two_pods_whose_numbers_collide_have_different_ones() -> None:
    uids: dict[int, str] = {}
    for uid in (f"p{number}" for number in range(10_000)):
        first = zlib.crc32(uid.encode()) % 4080
        if first in uids:
            break
        uids[first] = uid
    wanted = _of(
        _on(_pod(uids[first], limits=_OWN, created_at=1.0), "10.0.0.1"),
        _on(_pod(uid, limits=_OWN, created_at=2.0), "10.0.0.2"),
    )
    number = 0x100 + first * 0x10 + 0x8
    assert wanted.members == {"10.0.0.1": number, "10.0.0.2": number + 0x10}


def test_classes_have_names() -> None:
    names = {each.minor: name_of(each.minor) for each in _of().classes}
    assert names == {
        0x1: "node",
        0x10: "system",
        0x18: "system",
        0x20: "ls",
        0x28: "ls",
        0x30: "be",
        0x38: "be",
    }
    assert name_of(0x108) == "pod"


def test_a_burst_is_what_the_rate_allows_in_four_milliseconds_and_a_frame() -> None:
    wanted = _of(ls={"egressRequest": 80, "egressLimit": 100})
    group = next(each for each in wanted.classes if each.minor == 0x20)
    assert (group.rate, group.ceil) == (100_000_000, 125_000_000)
    assert group.buffer == ticks(100_000_000 // 250 + 1518, 100_000_000)
    assert group.cbuffer == ticks(125_000_000 // 250 + 1518, 125_000_000)


def test_every_limited_pod_has_a_number_of_its_own_until_there_are_none_left() -> None:
    pods = [
        _on(_pod(f"p{at}", "BE", limits=_OWN, created_at=float(at)), f"10.1.{at >> 8}.{at & 255}")
        for at in range(4082)
    ]
    minors = list(_of(*pods).members.values())
    assert len(set(minors[:4080])) == 4080
    assert min(minors[:4080]) == 0x108 and max(minors) == 0xFFF8
    assert minors[4080:] == [BE, BE]


def test_a_pod_keeps_its_number_while_others_come_and_go() -> None:
    pods = {
        uid: _on(_pod(uid, limits=_OWN, created_at=float(at)), f"10.0.1.{at}")
        for at, uid in enumerate(f"pod-{number}" for number in range(100))
    }
    before = _of(*pods.values()).members
    for uid in ("pod-7", "pod-50"):
        del pods[uid]
    after = _of(*reversed(pods.values())).members
    assert sum(before[address] != minor for address, minor in after.items()) == 0


_RATE = st.integers(0, 100) | st.integers(0, 2**40).map(str)


@given(
    total=st.integers(0, 2**40),
    speed=st.integers(0, 2**38),
    mtu=st.sampled_from([1280, 1500, 9000, 65536]),
    classes=st.fixed_dictionaries(
        {
            name: st.fixed_dictionaries({"egressRequest": _RATE, "egressLimit": _RATE})
            for name in ("ls", "be")
        }
    ),
    limits=st.lists(st.integers(0, 2**41), max_size=5),
)
def test_no_absurd_class(
    total: int, speed: int, mtu: int, classes: dict[str, Any], limits: list[int]
) -> None:
    pods = [
        _on(_pod(f"p{at}", "BE", limits=f'{{"egressLimit":"{limit}"}}'), f"10.0.0.{at}")
        for at, limit in enumerate(limits, 1)
    ]
    try:
        wanted = _of(*pods, total=str(total), line=Line("eth0", speed, mtu), **classes)
    except InputErrors:
        return
    made: dict[int, HtbClass] = {}
    for each in wanted.classes:
        assert each.minor not in made and (each.parent in made or each.minor == 1)
        made[each.minor] = each
        assert 0 < each.rate <= each.ceil <= max(wanted.bits // 8, 1_000)
        assert 0 < each.buffer < 1 << 32 and 0 < each.cbuffer < 1 << 32
        assert each.minor < 1 << 16
        # Other devices may take the low bits for one of their queues: 8 is their default.
        assert not each.quantum or each.minor & 0xF == 8
        if each.parent:
            assert each.ceil <= made[each.parent].ceil
    parents = {each.parent for each in wanted.classes}
    for minor in (SYSTEM, *wanted.members.values()):
        assert minor not in parents, "packets would be led to a class that only holds others"
    groups = [each for each in wanted.classes if each.parent == 1]
    assert sum(each.rate for each in groups) <= max(made[1].rate, 0) + 3 * 1_000

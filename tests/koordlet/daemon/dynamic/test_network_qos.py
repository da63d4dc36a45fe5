"""When traffic classes exist, on which device, and what bad input and a bad machine do to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import msgspec
import pytest

from hooks.subject import PodSubject
from koordlet.executor.network import FILE_NAME
from koordlet.exposition.network_metrics import of_network
from koordlet.state.merging import PodView
from linux.cgroup_paths import Driver, Layout
from linux.host import Host
from linux.network_devices import default_device
from linux.packet_classes import Group
from tests.beds.network import require_shaping
from tests.koordlet.daemon.dynamic.network_bed import (
    ROUTE,
    ROUTE6,
    Bed,
    Files,
    Kernel,
    shaped_node,
    view,
)
from tests.koordlet.prediction.pods import pod


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    require_shaping()
    with shaped_node(tmp_path) as made:
        yield made


# --- on a kernel -------------------------------------------------------------------------------


@pytest.mark.root
def test_classes_exist_while_gate_and_nodeslo_ask_for_them(kernel: Kernel) -> None:
    bed = kernel.bed
    assert kernel.look()[1].ceil == 100_000_000
    assert bed.qos.status.on and not bed.qos.status.problems
    bed.ask(policy="terway-qos")
    assert not kernel.look()
    bed.ask()
    assert kernel.look()
    bed.switch(False)
    assert not kernel.look() and not bed.network.applied
    assert [note.message.split()[0] for note in bed.notes] == [
        "eth0:",
        "traffic",
        "eth0:",
        "traffic",
    ]


@pytest.mark.root
def test_classes_of_a_killed_daemon_are_removed_too(kernel: Kernel) -> None:
    kernel.look()
    kernel.bed.switch(False)
    kernel.bed.start()
    assert not kernel.look()


@pytest.mark.root
def test_pods_come_and_go(kernel: Kernel) -> None:
    bed = kernel.bed
    assert len(kernel.look()) == 7
    bed.pods += (view("b", "10.0.0.2", "fd00::2", egress="8M"),)
    own = set(kernel.look()) - {0x1, 0x10, 0x18, 0x20, 0x28, 0x30, 0x38}
    (minor,) = own
    assert kernel.classes()[minor].ceil == 1_000_000
    status = bed.qos.as_json()
    assert {each["name"]: each["members"] for each in status["classes"]} == {
        "system": 0,
        "ls": 1,
        "be": 0,
        "pod": 2,
    }
    bed.pods = ()
    assert len(kernel.look()) == 7


@pytest.mark.root
def test_a_bad_nodeslo_leaves_the_last_rates_and_pods_go_on(kernel: Kernel) -> None:
    bed = kernel.bed
    bed.ask(egressLimit="80M")
    assert kernel.look()[0x38].ceil == 10_000_000
    bed.ask(egressLimit="900M")
    bed.pods = (view("b", "10.0.0.2", egress="8M"),)
    after = kernel.look()
    assert after[0x38].ceil == 10_000_000 and len(after) == 8
    assert "beClass.networkQOS.egressLimit" in kernel.problems[0]
    assert any("egressLimit" in event.message for event in bed.events.latest())
    bed.ask(egressLimit="160M")
    assert kernel.look()[0x38].ceil == 20_000_000 and not kernel.problems


@pytest.mark.root
def test_what_others_removed_returns(kernel: Kernel) -> None:
    kernel.look()
    kernel.namespace.tc("qdisc del dev eth0 root")
    assert not kernel.look(5.0), "the kernel is not read all the time"
    assert len(kernel.look(30.0)) == 7


@pytest.mark.root
def test_anothers_qdisc_is_named_and_taken_over_once_it_is_gone(kernel: Kernel) -> None:
    kernel.namespace.tc("qdisc add dev eth0 root handle 8001: pfifo")
    assert not kernel.look()
    assert "eth0: its queueing discipline pfifo 8001: was set by another" in kernel.problems[0]
    assert kernel.bed.events.totals["network-qos"] == 1
    kernel.look(30.0)
    assert kernel.bed.events.totals["network-qos"] == 1, "the same problem is one event"
    kernel.namespace.tc("qdisc del dev eth0 root")
    assert len(kernel.look(10.0)) == 7 and not kernel.problems


@pytest.mark.root
def test_a_device_that_is_made_again_is_shaped_again(kernel: Kernel) -> None:
    kernel.look()
    kernel.namespace.ip("link del eth0")
    del kernel.bed.files.content["/sys/class/net/eth0/ifindex"]
    kernel.look()
    assert kernel.problems == ("there is no network device eth0",)
    kernel.namespace.ip("link add name eth0 type veth peer name far")
    kernel.index = kernel.namespace.index("eth0")
    kernel.bed.files.content["/sys/class/net/eth0/ifindex"] = str(kernel.index)
    assert len(kernel.look()) == 7 and not kernel.problems


# --- without one -------------------------------------------------------------------------------


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    return Bed(tmp_path, 7)


def _problems(bed: Bed) -> tuple[str, ...]:
    bed.qos.look()
    return bed.qos.status.problems


def test_a_daemon_that_never_shaped_opens_nothing(bed: Bed) -> None:
    bed.switch(False)
    bed.network.error = AssertionError("applied")
    bed.qos.look()
    assert bed.qos.as_json()["state"] == "off" and not bed.qos.status.problems
    assert not (bed.folder / FILE_NAME).exists()


def test_nothing_is_applied_before_the_pods_are_listed(bed: Bed) -> None:
    bed.listed = False
    assert _problems(bed) == () and not bed.network.applied_to
    assert "waiting for the first list of pods" in bed.qos.as_json()["why"]


def test_a_group_that_is_made_again_is_another_member(bed: Bed) -> None:
    on_node = msgspec.structs.replace(pod("h"), host_network=True, cgroup="kubepods/podh")
    bed.pods = (PodView(on_node, PodSubject(pod=on_node), (), (), ()),)
    bed.network.error = PermissionError(1, "Operation not permitted")
    for version, inodes in ((1, {}), (2, {}), (2, {"/cg/kubepods/podh": 5})):
        bed.layout = Layout(
            version=version, driver=Driver.CGROUPFS, mounts={"": "/cg"}, kubepods=""
        )
        bed.files.namespaces |= inodes
        bed.qos.look()
    assert [wanted["members"] for wanted in bed.network.wanted] == [{}, {}, {Group(2, 5): 0x28}]
    bed.files.namespaces["/cg/kubepods/podh"] = 6
    bed.qos.look()
    assert bed.network.wanted[-1]["members"] == {Group(2, 6): 0x28}


def test_missing_rights_are_named(bed: Bed) -> None:
    bed.network.error = PermissionError(1, "Operation not permitted")
    (problem,) = _problems(bed)
    assert problem.startswith("eth0: Operation not permitted: koordlet needs CAP_NET_ADMIN")


def test_a_failure_is_not_repeated_at_once_unless_something_changed(bed: Bed) -> None:
    bed.network.error = PermissionError(1, "Operation not permitted")
    for after_s, tries in ((0.0, 1), (5.0, 1), (5.0, 2)):
        bed.now += after_s
        bed.qos.look()
        assert len(bed.network.applied_to) == tries
    bed.pods = ()
    bed.qos.look()
    assert len(bed.network.applied_to) == 3


def test_a_defect_is_a_problem_and_no_more(bed: Bed) -> None:
    bed.network.error = ZeroDivisionError("oops")
    (problem,) = _problems(bed)
    assert "a defect" in problem and "oops" in problem


def test_a_pod_network_namespace_is_refused(bed: Bed) -> None:
    bed.files.namespaces["/proc/1/ns/net"] = 2
    assert "not in the node's network namespace" in _problems(bed)[0]


def test_a_speed_that_is_not_known_is_named_where_it_is_needed(bed: Bed) -> None:
    bed.files.content["/sys/class/net/eth0/speed"] = "-1\n"
    bed.ask(total="0")
    (problem,) = _problems(bed)
    assert "totalNetworkBandwidth" in problem and "eth0 does not report its speed" in problem
    assert not bed.network.applied_to


def test_the_configured_device_counts(bed: Bed) -> None:
    bed.start(device="bond0.100")
    assert _problems(bed) == ("there is no network device bond0.100",)
    bed.start(device="../eth0")
    assert "not a name of a network device" in _problems(bed)[0]


@pytest.mark.parametrize(
    ("route", "route6", "device"),
    [
        (ROUTE, "", "eth0"),
        (ROUTE.splitlines()[0], ROUTE6, "eth6"),
        (ROUTE.splitlines()[0], "", ""),
        (ROUTE.replace("0003", "0200"), ROUTE6, "eth6"),
    ],
    ids=["the least metric", "IPv6 alone", "none", "not up or rejecting"],
)
def test_the_device_of_the_default_route(route: str, route6: str, device: str) -> None:
    files = Files()
    files.content = {"/proc/1/net/route": route, "/proc/1/net/ipv6_route": route6}
    assert default_device(cast("Host", files)) == device


def test_gauges_are_finite_and_name_the_classes(bed: Bed) -> None:
    bed.network.error = PermissionError(1, "Operation not permitted")
    bed.qos.look()
    assert {name: value for name, _, value in of_network(bed.qos.status)} == {
        "network_qos_on": 1.0,
        "network_qos_problems": 1.0,
    }

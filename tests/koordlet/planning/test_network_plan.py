"""What `koordctl plan` shows of traffic classes: the steps of the next look, not carried out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from koordlet.executor.network import FILE_NAME, Network
from koordlet.planning.network_plan import Shaped, plan_network
from linux.host import Host
from tests.beds.network import require_shaping
from tests.koordlet.daemon.dynamic.network_bed import Bed, Kernel, shaped_node, view


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    require_shaping()
    with shaped_node(tmp_path) as made:
        yield made


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    return Bed(tmp_path, 7)


def _plan(bed: Bed, *, offline: bool = False) -> tuple[list[Any], list[Any]]:
    return plan_network(
        Shaped(Network(str(bed.folder / FILE_NAME)), "", offline),
        bed.inputs,
        host=cast("Host", bed.files),
        layout=bed.layout,
        pods=bed.pods,
    )


class Planned:
    """A plan in the kernel's namespace."""

    def __init__(self, kernel: Kernel, *, offline: bool = False) -> None:
        writes, problems = kernel.namespace.run(_plan, kernel.bed, offline=offline)
        self.rows = [
            (each["act"], each["name"], each["resource"], each["old"], each["new"])
            for each in writes
        ]
        self.whys = [each["why"] for each in writes]
        self.problems = [each["message"] for each in problems]


@pytest.mark.root
def test_nothing_is_planned_for_what_is_in_force(kernel: Kernel) -> None:
    kernel.look()
    assert Planned(kernel).rows == []


@pytest.mark.root
def test_the_first_classes_are_planned_from_the_root_down_and_not_made(kernel: Kernel) -> None:
    planned = Planned(kernel)
    assert planned.rows[0] == (
        "add", "eth0", "network.device", "the kernel's default", "htb 4b4f:",
    )  # fmt: skip
    assert [row[2] for row in planned.rows[1:8]] == [
        "network.class node 4b4f:1",
        "network.class system 4b4f:10",
        "network.class system 4b4f:18",
        "network.class ls 4b4f:20",
        "network.class ls 4b4f:28",
        "network.class be 4b4f:30",
        "network.class be 4b4f:38",
    ]
    assert planned.rows[-2][2:] == ("network.table", "", "inet koordlet-network")
    assert planned.rows[-1] == (
        "move", "default/a", "network.class", "system 4b4f:18", "ls 4b4f:28",
    )  # fmt: skip
    assert kernel.classes() == {} and not kernel.bed.network.applied
    assert len(kernel.look()) == 7


@pytest.mark.root
def test_another_limit_of_a_class_is_planned_with_its_field(kernel: Kernel) -> None:
    bed = kernel.bed
    bed.ask(egressLimit="80M")
    kernel.look()
    bed.ask(egressLimit="160M")
    planned = Planned(kernel)
    assert [row[:3] for row in planned.rows] == [
        ("change", "eth0", "network.class be 4b4f:30"),
        ("change", "eth0", "network.class be 4b4f:38"),
    ]
    _, _, _, old, new = planned.rows[0]
    assert (old, new) == ("rate 8 kbit/s, ceil 80 Mbit/s", "rate 8 kbit/s, ceil 160 Mbit/s")
    assert planned.whys[0] == "network-qos: egressRequest 0 %, egressLimit 160M"
    assert kernel.classes()[0x30].ceil == 10_000_000


@pytest.mark.root
def test_a_pods_new_limit_and_a_pod_that_has_gone_are_planned(kernel: Kernel) -> None:
    bed = kernel.bed
    bed.pods += (view("b", "10.0.0.2"),)
    kernel.look()
    bed.pods = (view("a", "10.0.0.1", egress="8M"),)
    rows = Planned(kernel).rows
    (own,) = [row for row in rows if row[:2] == ("add", "default/a")]
    assert own[4] == "rate 8 kbit/s, ceil 8 Mbit/s"
    moves = [row for row in rows if row[2] == "network.class"]
    assert moves[0][:2] == ("move", "default/a") and moves[0][3] == "ls 4b4f:28"
    assert moves[1] == ("delete", "eth0", "network.class", "1 addresses or cgroups", "-")


@pytest.mark.root
def test_what_is_in_the_way_is_a_problem_of_the_plan(kernel: Kernel) -> None:
    kernel.namespace.tc("qdisc add dev eth0 root handle 8001: pfifo")
    planned = Planned(kernel)
    assert planned.rows == []
    (problem,) = planned.problems
    assert problem.startswith("eth0: its queueing discipline pfifo 8001: was set by another")


@pytest.mark.root
def test_the_end_of_network_qos_is_planned(kernel: Kernel) -> None:
    kernel.look()
    kernel.bed.switch(False)
    assert Planned(kernel).rows == [
        ("delete", "eth0", "network.device", "htb 4b4f:", "the kernel's default")
    ]
    assert len(kernel.classes()) == 7


@pytest.mark.root
def test_a_move_to_another_device_is_planned(kernel: Kernel) -> None:
    kernel.look()
    kernel.bed.files.content["/sys/class/net/eth0/ifindex"] = str(kernel.namespace.index("far"))
    rows = Planned(kernel).rows
    assert rows[0] == ("delete", "eth0", "network.device", "htb 4b4f:", "the kernel's default")
    assert rows[1][0] == "add"


@pytest.mark.root
def test_without_the_pods_addresses_only_the_shared_classes_are_planned(kernel: Kernel) -> None:
    bed = kernel.bed
    bed.ask(egressLimit="80M")
    bed.pods = (view("a", "10.0.0.1", egress="8M"),)
    kernel.look()
    # As the runtime alone reports it.
    bed.pods = (replace(bed.pods[0], addresses=(), described=False),)
    bed.ask(egressLimit="160M")
    planned = Planned(kernel, offline=True)
    assert {row[2] for row in planned.rows} == {
        "network.class be 4b4f:30",
        "network.class be 4b4f:38",
    }
    assert planned.problems == ["pods are left out: their addresses are in Pod objects only"]


def test_nothing_is_planned_while_it_is_off_and_was_never_on(bed: Bed) -> None:
    bed.switch(False)
    assert _plan(bed) == ([], [])


def test_a_nodeslo_that_cannot_be_used_is_a_problem_of_the_plan(bed: Bed) -> None:
    bed.ask(egressLimit="900M")
    writes, problems = _plan(bed)
    assert writes == []
    (problem,) = problems
    assert problem["object"] == "NodeSLO" and "egressLimit" in problem["message"]


def test_a_device_that_is_not_there_is_a_problem_of_the_plan(bed: Bed) -> None:
    del bed.files.content["/sys/class/net/eth0/ifindex"]
    writes, problems = _plan(bed)
    assert writes == []
    assert problems[0]["message"] == (
        "traffic classes cannot be planned: there is no network device eth0"
    )

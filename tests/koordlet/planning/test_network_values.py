"""What `koordctl explain` shows of network QoS: of the node, and of a pod."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from apis.qos import QoSClass
from koordctl.render import explanation
from koordlet.planning.network_values import values_of_node, values_of_pod
from linux.cgroup_paths import Driver, Layout
from tests.beds.network import require_shaping
from tests.koordlet.daemon.dynamic.network_bed import Bed, Kernel, shaped_node, view

_V1 = Layout(version=1, driver=Driver.CGROUPFS, mounts={"": "/cg"}, kubepods="")


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    require_shaping()
    with shaped_node(tmp_path) as made:
        yield made


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    return Bed(tmp_path, 7)


def _of_node(bed: Bed) -> dict[str, dict[str, Any]]:
    """Return the node's values by resource and key."""
    return {
        f"{value['resource']} {value['key']}": value for value in values_of_node(bed.qos.status)
    }


def _of_pod(bed: Bed, uid: str) -> dict[str, Any]:
    (found,) = (each.pod for each in bed.pods if each.pod.uid == uid)
    values, faults = values_of_pod(bed.qos.status, found)
    assert not faults
    (value,) = values
    return value


@pytest.mark.root
def test_the_node_has_its_device_and_its_classes(kernel: Kernel) -> None:
    kernel.bed.ask(egressRequest=5, egressLimit="80M")
    kernel.look()
    values = _of_node(kernel.bed)
    assert set(values) == {
        "network.device eth0",
        "network.class system",
        "network.class ls",
        "network.class be",
    }
    assert {value["state"] for value in values.values()} == {"applied"}
    device = values["network.device eth0"]
    assert device["desired"] == device["observed"] == "htb 4b4f:"
    assert device["winner"]["source"] == "the default route"
    assert device["original"] == "the kernel's default"
    be = values["network.class be"]
    assert be["desired"] == be["observed"] == "rate 40 Mbit/s, ceil 80 Mbit/s"
    assert be["why"] == "network-qos: egressRequest 5 %, egressLimit 80M"
    assert be["winner"]["source"] == "NodeSLO spec.resourceQOSStrategy.beClass.networkQOS"
    assert be["path"] == "eth0 4b4f:30"


@pytest.mark.root
def test_a_pod_has_its_class_and_the_reasons(kernel: Kernel) -> None:
    bed = kernel.bed
    bed.pods += (view("b", "10.0.0.2", "fd00::2", egress="8M", qos=QoSClass.BE),)
    kernel.look()
    shared = _of_pod(bed, "a")
    assert (shared["desired"], shared["observed"]) == ("ls 4b4f:28", "ls 4b4f:28")
    assert shared["state"] == "applied"
    assert shared["why"] == "network-qos: QoS class LS (by 10.0.0.1)"
    own = _of_pod(bed, "b")
    assert own["desired"] == own["observed"]
    assert own["desired"].endswith(" in be, up to 8 Mbit/s")
    (limit,) = own["modifiers"]
    assert limit["source"] == "annotation koordinator.sh/networkQOS"
    assert own["members"] == ["10.0.0.2", "fd00::2"]


@pytest.mark.root
def test_a_pod_on_the_nodes_network_says_why_cgroup_v1_has_it_in_class_system(
    kernel: Kernel,
) -> None:
    bed = kernel.bed
    bed.layout = _V1
    bed.pods = (view("h", "192.0.2.1", host_network=True),)
    kernel.look()
    value = _of_pod(bed, "h")
    assert (value["desired"], value["observed"]) == ("system 4b4f:18", "system 4b4f:18")
    assert value["state"] == "degraded"
    assert value["winner"]["degraded"] == (
        "it has the node's address, and on cgroup v1 nftables cannot tell the cgroup of a socket"
    )
    shown = explanation(
        {
            "subjects": [
                {
                    "subject": "pod/h",
                    "level": "pod",
                    "name": "default/h",
                    "cgroup": "",
                    "values": [value],
                    "faults": [],
                }
            ]
        }
    )
    assert "degraded: it has the node's address" in shown


@pytest.mark.root
def test_what_is_in_the_way_is_shown_at_every_value(kernel: Kernel) -> None:
    kernel.namespace.tc("qdisc add dev eth0 root handle 8001: pfifo")
    kernel.look()
    values = _of_node(kernel.bed)
    assert {value["state"] for value in values.values()} == {"blocked"}
    assert all("pfifo 8001: was set by another" in value["detail"] for value in values.values())
    assert {value["observed"] for value in values.values()} == {None}
    assert _of_pod(kernel.bed, "a")["state"] == "blocked"


@pytest.mark.root
def test_a_class_that_the_kernel_lost_to_another_program_is_not_shown_as_in_force(
    kernel: Kernel,
) -> None:
    """Taken away while our qdisc is refused: nothing of ours is in force any more."""
    kernel.look()
    assert _of_node(kernel.bed)["network.class be"]["state"] == "applied"
    kernel.namespace.tc("qdisc replace dev eth0 root handle 8001: pfifo")
    kernel.look(30.0)
    be = _of_node(kernel.bed)["network.class be"]
    assert (be["state"], be["observed"]) == ("blocked", None)


def test_a_pod_that_is_not_known_yet_waits(bed: Bed) -> None:
    bed.network.error = PermissionError(1, "Operation not permitted")
    bed.qos.look()
    bed.pods += (view("b", "10.0.0.2"),)
    assert _of_pod(bed, "b")["state"] == "pending"


def test_a_refusal_of_the_kernel_is_the_detail(bed: Bed) -> None:
    bed.network.error = PermissionError(1, "Operation not permitted")
    bed.qos.look()
    device = _of_node(bed)["network.device eth0"]
    assert device["state"] == "failed" and "needs CAP_NET_ADMIN" in device["detail"]


def test_nothing_is_shown_while_it_is_off(bed: Bed) -> None:
    bed.switch(False)
    bed.qos.look()
    assert values_of_node(bed.qos.status) == []
    assert values_of_pod(bed.qos.status, bed.pods[0].pod) == ([], [])


def test_a_problem_before_anything_is_known_is_shown(bed: Bed) -> None:
    bed.start(device="nope0")
    bed.qos.look()
    (device,) = values_of_node(bed.qos.status)
    assert (device["state"], device["detail"]) == ("failed", "there is no network device nope0")


def test_a_bad_annotation_is_a_fault_of_the_pod(bed: Bed) -> None:
    bed.network.error = PermissionError(1, "Operation not permitted")
    bed.pods = (view("a", "10.0.0.1", egress="much"),)
    bed.qos.look()
    _, faults = values_of_pod(bed.qos.status, bed.pods[0].pod)
    (fault,) = faults
    assert fault["policy"] == "network-qos" and "egressLimit" in fault["message"]

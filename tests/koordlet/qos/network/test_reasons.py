"""What an operator reads about a class's rates and a pod's class."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from apis.keys import ANNOTATION_NETWORK_QOS
from apis.qos import QoSClass
from koordlet.qos.network.classes import BE, LS, SYSTEM, Line, PodOnNetwork, network_classes
from koordlet.qos.network.reasons import Placement, class_reason, placements
from tests.hooks.making import slo
from tests.koordlet.prediction.pods import pod

_ETH0 = Line("eth0", 10**9, 1500)


def _spec(total: str = "1G", **be: Any) -> Any:
    return slo(
        {
            "systemStrategy": {"totalNetworkBandwidth": total},
            "resourceQOSStrategy": {"beClass": {"networkQOS": be}},
        }
    )


@pytest.mark.parametrize(
    ("minor", "total", "be", "text", "source"),
    [
        (
            BE,
            "1G",
            {"enable": True, "egressRequest": 5, "egressLimit": "200M"},
            "egressRequest 5 %, egressLimit 200M",
            "NodeSLO spec.resourceQOSStrategy.beClass.networkQOS",
        ),
        (
            BE,
            "1G",
            {"enable": True},
            "egressRequest 0 %, no egressLimit",
            "NodeSLO spec.resourceQOSStrategy.beClass.networkQOS",
        ),
        (
            LS,
            "1G",
            {},
            "not enabled: no guarantee, and the total as its limit",
            "NodeSLO spec.resourceQOSStrategy.lsClass.networkQOS.enable",
        ),
        (
            SYSTEM,
            "1G",
            {},
            "what ls and be leave of totalNetworkBandwidth, up to all of it",
            "NodeSLO spec.systemStrategy.totalNetworkBandwidth",
        ),
        (
            SYSTEM,
            "0",
            {},
            "what ls and be leave of the speed of eth0, up to all of it",
            "speed of eth0",
        ),
    ],
)
def test_the_field_that_gives_a_class_its_rates(
    minor: int, total: str, be: dict[str, Any], text: str, source: str
) -> None:
    reason = class_reason(minor, _spec(total, **be), "eth0")
    assert (reason.text, reason.source) == (text, source)


def _placed(*pods: PodOnNetwork) -> list[Placement]:
    wanted = network_classes(_spec(), pods, _ETH0)
    found = placements(pods, wanted.members)
    return [found[each.pod.uid] for each in pods]


def _pod(uid: str, limit: str = "", **fields: Any) -> Any:
    annotations = {ANNOTATION_NETWORK_QOS: f'{{"egressLimit":"{limit}"}}'} if limit else {}
    return replace(pod(uid), annotations=annotations, **fields)


@pytest.mark.parametrize(
    ("qos", "minor", "text"),
    [
        (QoSClass.LS, LS, "QoS class LS"),
        (QoSClass.BE, BE, "QoS class BE"),
        (QoSClass.SYSTEM, SYSTEM, "QoS class SYSTEM"),
        (QoSClass.NONE, SYSTEM, "no QoS class"),
    ],
)
def test_a_pod_is_in_the_class_of_its_label(qos: QoSClass, minor: int, text: str) -> None:
    (place,) = _placed(PodOnNetwork(_pod("a", qos=qos), ("10.0.0.1",)))
    assert (place.minor, place.shared, place.lacking) == (minor, minor, "")
    assert place.reason.text == text
    assert place.reason.source == "label koordinator.sh/qosClass"


def test_a_pods_limit_comes_from_its_annotation() -> None:
    (place,) = _placed(PodOnNetwork(_pod("a", "8M"), ("10.0.0.1",)))
    assert place.minor not in (SYSTEM, LS, BE) and place.shared == LS
    assert place.limit is not None
    assert place.limit.text == "egressLimit of 8000000 bit/s"
    assert place.limit.source == "annotation koordinator.sh/networkQOS"


def test_a_bad_annotation_is_a_fault_of_the_pod() -> None:
    (place,) = _placed(PodOnNetwork(_pod("a", "much"), ("10.0.0.1",)))
    assert place.minor == LS and place.limit is None
    (fault,) = place.faults
    assert "egressLimit" in str(fault)


@pytest.mark.parametrize(
    ("no_group", "lacking"), [("", "its status has no address yet"), ("no cgroup", "no cgroup")]
)
def test_a_pod_whose_packets_cannot_be_classified_says_why(no_group: str, lacking: str) -> None:
    on_node = _pod("a", host_network=bool(no_group))
    (place,) = _placed(PodOnNetwork(on_node, no_group=no_group))
    assert (place.minor, place.shared, place.lacking) == (SYSTEM, LS, lacking)


def test_a_pod_of_the_system_class_lacks_nothing_without_an_address() -> None:
    (place,) = _placed(PodOnNetwork(_pod("a", qos=QoSClass.SYSTEM)))
    assert place.lacking == ""


@pytest.mark.parametrize("limits", [("", "8M"), ("8M", ""), ("8M", "9M"), ("", "")])
def test_the_older_pod_of_two_with_one_address_says_so(limits: tuple[str, str]) -> None:
    old, new = _placed(
        PodOnNetwork(_pod("old", limits[0], created_at=1.0), ("10.0.0.1",)),
        PodOnNetwork(_pod("new", limits[1], created_at=2.0, qos=QoSClass.BE), ("10.0.0.1",)),
    )
    assert old.minor == new.minor and new.lacking == ""
    assert old.lacking == "a newer pod has the same address"


def test_a_pod_that_has_ended_has_no_class() -> None:
    assert placements([PodOnNetwork(_pod("a", phase="Failed"), ("10.0.0.1",))], {}) == {}

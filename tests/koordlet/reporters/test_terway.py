"""The files of terway-qos: their content, and that only koordlet's own are removed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from apis.keys import ANNOTATION_NETWORK_QOS
from apis.qos import KubeQoS
from hooks.subject import Pod, make_pod
from koordlet.qos.network.bandwidth import Bandwidths, ClassBandwidth, Rate
from koordlet.reporters.terway import GLOBAL, PODS, TerwayFiles, global_config, pod_table

_RATES = Bandwidths(
    total=8000,
    ls=ClassBandwidth(ingress=Rate(80, 160), egress=Rate(240, 320)),
    be=ClassBandwidth(ingress=Rate(8, 16), egress=Rate(24, 32)),
)


def _pod(
    name: str, qos: str = "", kube_qos: KubeQoS = KubeQoS.BURSTABLE, limits: str | None = None
) -> Pod:
    return make_pod(
        namespace="default",
        name=name,
        uid=f"uid-{name}",
        labels={"koordinator.sh/qosClass": qos} if qos else {},
        annotations={} if limits is None else {ANNOTATION_NETWORK_QOS: limits},
        kube_qos=kube_qos,
        cgroup=f"kubepods/pod{name}",
    )


def test_the_nodes_rates_are_bytes_in_upstreams_order() -> None:
    assert global_config(_RATES).decode().splitlines() == [
        "hw_tx_bps_max 1000",
        "hw_rx_bps_max 1000",
        "offline_l1_tx_bps_min 30",
        "offline_l1_tx_bps_max 40",
        "offline_l1_rx_bps_min 10",
        "offline_l1_rx_bps_max 20",
        "offline_l2_tx_bps_min 3",
        "offline_l2_tx_bps_max 4",
        "offline_l2_rx_bps_min 1",
        "offline_l2_rx_bps_max 2",
    ]


def test_a_pod_has_its_place_and_its_limits() -> None:
    pod = _pod("a", "BE", limits='{"ingressLimit":"8k","egressLimit":"16k"}')
    table, errors = pod_table([pod], "/sys/fs/cgroup/net_cls")
    assert not errors
    assert json.loads(table) == {
        "uid-a": {
            "podName": "a",
            "podNamespace": "default",
            "podUID": "uid-a",
            "prio": 2,
            "cgroupDir": "/sys/fs/cgroup/net_cls/kubepods/poda",
            "qosConfig": {"ingressBandwidth": 1000, "egressBandwidth": 2000},
        }
    }


@pytest.mark.parametrize(
    ("qos", "kube_qos", "priority"),
    [
        ("SYSTEM", KubeQoS.BESTEFFORT, 0),
        ("LSE", KubeQoS.GUARANTEED, 1),
        ("LSR", KubeQoS.GUARANTEED, 1),
        ("LS", KubeQoS.BESTEFFORT, 1),
        ("BE", KubeQoS.BURSTABLE, 2),
        ("", KubeQoS.GUARANTEED, 1),
        ("", KubeQoS.BURSTABLE, 1),
        ("", KubeQoS.BESTEFFORT, 2),
    ],
)
def test_the_priority_follows_the_class(qos: str, kube_qos: KubeQoS, priority: int) -> None:
    table, _ = pod_table([_pod("a", qos, kube_qos)], "/x")
    assert json.loads(table)["uid-a"]["prio"] == priority


def test_a_bad_annotation_costs_its_own_pod_its_limits() -> None:
    pods = [_pod("bad", limits='{"egressLimit":"-5"}'), _pod("good", limits='{"egressLimit":"8"}')]
    table, errors = pod_table(pods, "/x")
    found = {uid: each["qosConfig"]["egressBandwidth"] for uid, each in json.loads(table).items()}
    assert found == {"uid-bad": 0, "uid-good": 1}
    assert len(errors) == 1 and "default/bad" in str(errors[0])


def test_files_are_replaced_when_they_change_or_are_missing(tmp_path: Path) -> None:
    directory = tmp_path / "terway" / "qos"
    files = TerwayFiles(str(directory))
    files.write({GLOBAL: b"1", PODS: b"{}"})
    before = (directory / GLOBAL).stat().st_ino
    files.write({GLOBAL: b"1", PODS: b"{1}"})
    assert (directory / GLOBAL).stat().st_ino == before
    assert (directory / PODS).read_bytes() == b"{1}"
    (directory / GLOBAL).unlink()
    files.write({GLOBAL: b"1", PODS: b"{1}"})
    assert (directory / GLOBAL).read_bytes() == b"1"


def test_only_files_of_koordlet_are_removed(tmp_path: Path) -> None:
    (tmp_path / PODS).write_bytes(b"another's")
    assert not TerwayFiles(str(tmp_path)).remove()
    assert (tmp_path / PODS).read_bytes() == b"another's"
    TerwayFiles(str(tmp_path)).write({GLOBAL: b"1", PODS: b"{}"})
    assert TerwayFiles(str(tmp_path)).remove()
    assert not list(tmp_path.iterdir())

"""Network QoS under the shipped unit, with the drop-in of docs/qos.md, on a VLAN on a bond.

The service keeps the drop-in and the gate until it is started again, which takes a quarter of a
minute in emulation: this file is the last of the session, and the service ends with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
import yaml

from tests.e2e.manifests import nodeslo, pod
from tests.vm.inside.node import CGROUPS, Node, run
from tests.vm.inside.service import BE_IDLE, ETC, GATES, LS_PROTECTED, Service
from tests.waiting import wait_until

_BOND, _DEVICE = "uplink0", "uplink0.5"
_CLASSES = {"beClass": BE_IDLE, "lsClass": LS_PROTECTED}
_BE_LIMIT = "8k"
"""Bits per second: what `_SEND` sends takes a minute in this class, and no time in another."""
_DROPIN = Path("/etc/systemd/system/koordlet.service.d/network-qos.conf")
_PATIENCE_S = 90.0
"""In emulation pyroute2 takes some ten seconds to import."""
_DATAGRAMS = 60
_SEND = f"""
[ -z "$1" ] || echo $$ >"$1/cgroup.procs"
for ((sent = 0; sent < {_DATAGRAMS}; sent++)); do printf %01000d 0 >/dev/udp/10.98.0.2/9; done
"""


_DEVICES = f"""
link add name member0 type veth peer name far0
link add name {_BOND} type bond mode active-backup
link set dev member0 master {_BOND}
link add link {_BOND} name {_DEVICE} type vlan id 5
addr add 10.98.0.1/24 dev {_DEVICE}
link set dev far0 up
link set dev {_BOND} up
link set dev {_DEVICE} up
neigh replace 10.98.0.2 lladdr 02:00:00:00:00:02 dev {_DEVICE}
"""


@pytest.fixture
def shaping(service: Service, tmp_path: Path) -> Iterator[Service]:
    """koordlet with the gate and the drop-in, and a device to shape."""
    commands = tmp_path / "devices"
    commands.write_text(_DEVICES)
    run("ip", "-batch", str(commands))
    config = ETC / "config.yaml"
    before = config.read_text()
    changed = yaml.safe_load(before)
    changed["featureGates"] = {**GATES, "TCNetworkQoS": True}
    changed["networkQos"] = {"device": _DEVICE}
    config.write_text(yaml.safe_dump(changed))
    _DROPIN.parent.mkdir(exist_ok=True)
    _DROPIN.write_text("[Service]\nCapabilityBoundingSet=CAP_NET_ADMIN\n")
    run("systemctl", "daemon-reload")
    limited = {"networkQOS": {"enable": True, "egressLimit": _BE_LIMIT}}
    service.put(nodeslo(beClass={**BE_IDLE, **limited}, lsClass=LS_PROTECTED))
    try:
        service.restart()
        yield service
    finally:
        _DROPIN.unlink(missing_ok=True)
        config.write_text(before)
        service.put(nodeslo(**_CLASSES))
        for device in (_BOND, "far0"):
            run("ip", "link", "del", device)


def _gauge(name: str, label: str = "") -> float | None:
    """Return a series of network QoS; None while there is none. `koordctl` would take 3 s."""
    with urlopen("http://127.0.0.1:9316/internal-metrics", timeout=30) as answer:
        text = answer.read().decode()
    series = rf"^koordlet_network_qos_{name}\{{[^}}]*{label}[^}}]*\}} (\S+)$"
    found = re.search(series, text, re.MULTILINE)
    return None if found is None else float(found.group(1))


def test_best_effort_traffic_is_held_and_the_nodes_own_is_not(
    machine: Node, shaping: Service
) -> None:
    manifest = pod("on-the-nodes-network", "BE")
    manifest["spec"]["hostNetwork"] = True
    with shaping.knowing(manifest):
        made = machine.run_pod(manifest)
        wait_until(
            lambda: _gauge("members") == 1,
            "traffic is shaped, and the pod is in its class",
            timeout_s=_PATIENCE_S,
            every_s=0.5,
        )
        line = _gauge("class_ceil_bits", 'class="system"')
        assert line == 10e9, "the speed of the bond's member, which is a veth"
        assert _gauge("problems") == 0
        for group in (str(CGROUPS / made.container_cgroup("main")), ""):
            run("bash", "-c", _SEND, "send", group)
        wait_until(
            lambda: _sent(_classes(), "4b4f:18") > _DATAGRAMS * 1000, "the node's packets are sent"
        )
        shown = _classes()
        machine.remove(made)
    assert _sent(shown, "4b4f:38") < _DATAGRAMS * 1000 / 2, shown
    assert _waiting(shown, "4b4f:38") > _DATAGRAMS / 2 and not _waiting(shown, "4b4f:18"), shown


def _classes() -> str:
    return run("tc", "-s", "class", "show", "dev", _DEVICE)


def _sent(shown: str, name: str) -> int:
    """Return the bytes that a class has sent."""
    words = shown.split()
    return int(words[words.index("Sent", words.index(name)) + 1])


def _waiting(shown: str, name: str) -> int:
    """Return how many packets wait in a class: of `backlog 66Kb 60p`, the second number."""
    words = shown.split()
    at = words.index("backlog", words.index(name))
    return int(words[at + 2].removesuffix("p"))

"""Network QoS under the shipped unit, with the drop-in of docs/qos.md.

Run by hand, since it takes 75 s of emulation:

    python -m tests.vm tests/vm/inside/test_traffic.py tests/koordlet/executor/test_network.py

The service keeps the drop-in until it is started again, which takes half a minute in emulation:
this file is the last of the session, and the service ends with it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.manifests import nodeslo, pod
from tests.vm.inside.node import CGROUPS, Node, run
from tests.vm.inside.service import BE_IDLE, ETC, GATES, LS_PROTECTED, Service
from tests.waiting import wait_until

_DEVICE = "uplink0"
_CLASSES = {"beClass": BE_IDLE, "lsClass": LS_PROTECTED}
_DROPIN = Path("/etc/systemd/system/koordlet.service.d/network-qos.conf")
_PATIENCE_S = 90.0
"""In emulation pyroute2 takes some ten seconds to import, and each question to the daemon three."""
_SENDS = """
import os, socket, sys
with open(sys.argv[1] + "/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
sending = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(60):
    sending.sendto(bytes(1000), ("10.98.0.2", 9))
"""


@pytest.fixture
def shaping(service: Service) -> Iterator[Service]:
    """koordlet with the gate and the drop-in, and a device to shape."""
    run("ip", "link", "add", "name", _DEVICE, "type", "veth", "peer", "name", "far0")
    run("ip", "addr", "add", "10.98.0.1/24", "dev", _DEVICE)
    for device in (_DEVICE, "far0"):
        run("ip", "link", "set", "dev", device, "up")
    neighbour = ("10.98.0.2", "lladdr", "02:00:00:00:00:02", "dev", _DEVICE)
    run("ip", "neigh", "replace", *neighbour)
    config = ETC / "config.yaml"
    before = config.read_text()
    changed = yaml.safe_load(before)
    changed["featureGates"] = {**GATES, "TCNetworkQoS": True}
    changed["networkQos"] = {"device": _DEVICE}
    config.write_text(yaml.safe_dump(changed))
    _DROPIN.parent.mkdir(exist_ok=True)
    _DROPIN.write_text("[Service]\nCapabilityBoundingSet=CAP_NET_ADMIN\n")
    run("systemctl", "daemon-reload")
    slo = nodeslo(**_CLASSES)
    slo["spec"]["systemStrategy"] = {"totalNetworkBandwidth": "1G"}
    service.put(slo)
    try:
        service.restart()
        yield service
    finally:
        _DROPIN.unlink(missing_ok=True)
        config.write_text(before)
        service.put(nodeslo(**_CLASSES))
        run("systemctl", "daemon-reload")
        run("systemctl", "reload", "koordlet")
        run("ip", "link", "del", _DEVICE)


def _members(service: Service, name: str) -> int:
    classes = _network(service)["classes"]
    return sum(each["members"] for each in classes if each["name"] == name)


def _network(service: Service) -> Any:
    return service.status()["networkQos"]


def test_traffic_is_shaped_with_the_drop_in_of_the_documentation(
    machine: Node, shaping: Service
) -> None:
    wait_until(lambda: _network(shaping)["classes"], "traffic is shaped", timeout_s=_PATIENCE_S)
    assert not _network(shaping)["problems"]
    assert "htb 4b4f: root" in run("tc", "qdisc", "show", "dev", _DEVICE)

    manifest = pod("on-the-nodes-network", "BE")
    manifest["spec"]["hostNetwork"] = True
    with shaping.knowing(manifest):
        made = machine.run_pod(manifest)
        wait_until(
            lambda: _members(shaping, "be") == 1,
            "the pod is in its class",
            timeout_s=_PATIENCE_S,
        )
        group = CGROUPS / made.container_cgroup("main")
        subprocess.run([sys.executable, "-c", _SENDS, str(group)], check=True, timeout=60)
        shown = run("tc", "-s", "class", "show", "dev", _DEVICE)
        assert _sent(shown, "4b4f:38") > 50 * 1000 > _sent(shown, "4b4f:18")
        machine.remove(made)

    config = ETC / "config.yaml"
    config.write_text(config.read_text().replace("TCNetworkQoS: true", "TCNetworkQoS: false"))
    run("systemctl", "reload", "koordlet")
    wait_until(
        lambda: "noqueue 0: root" in run("tc", "qdisc", "show", "dev", _DEVICE),
        "the default is back",
        timeout_s=_PATIENCE_S,
    )


def _sent(shown: str, name: str) -> int:
    words = shown.split()
    return int(words[words.index("Sent", words.index(name)) + 1])

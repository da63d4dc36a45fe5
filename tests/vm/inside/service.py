"""koordlet as a systemd unit: installed from the checkout's files, configured, running."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.beds.daemon import NODE_NAME
from tests.e2e.manifests import Manifest, nodeslo
from tests.vm.inside.node import run
from tests.waiting import wait_until

CHECKOUT = Path(__file__).resolve().parents[3]
UNIT = Path("/etc/systemd/system/koordlet.service")
ETC = Path("/etc/koordlet")
RUN = Path("/run/koordlet")
OBJECTS = ETC / "objects.d"
KOORDCTL = "/opt/koordinator/bin/koordctl"

GATES = {
    "CPUNormalization": True,
    "OOMScoreAdj": True,
    "CgroupReconcile": True,
}
BE_IDLE = {"cpuQOS": {"enable": True, "groupIdentity": -1}}
LS_PROTECTED = {"memoryQOS": {"enable": True, "minLimitPercent": 100, "lowLimitPercent": 100}}


class Service:
    """What a test does with the unit."""

    def put(self, *manifests: Manifest) -> None:
        for manifest in manifests:
            name = f"{manifest['kind']}-{manifest['metadata']['name']}".lower()
            scratch = OBJECTS / f".{name}.tmp"
            scratch.write_text(yaml.safe_dump(manifest))
            scratch.rename(OBJECTS / f"{name}.yaml")

    def gates(self, wanted: Mapping[str, bool]) -> None:
        """Switch feature gates by a reload."""
        path = ETC / "config.yaml"
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"featureGates": wanted}))
        run("systemctl", "reload", "koordlet")

    def show(self, name: str) -> str:
        """A property of the unit."""
        return run("systemctl", "show", "koordlet", "--value", "-p", name).strip()

    @contextmanager
    def knowing(self, manifest: Manifest) -> Iterator[Manifest]:
        """Give the daemon the Pod object too: a runtime tells no memory requests."""
        self.put(manifest)
        try:
            yield manifest
        finally:
            name = f"{manifest['kind']}-{manifest['metadata']['name']}".lower()
            (OBJECTS / f"{name}.yaml").unlink()

    @property
    def pid(self) -> int:
        return int(self.show("MainPID"))

    def start(self) -> None:
        run("systemctl", "start", "koordlet", timeout_s=90)

    def restart(self) -> None:
        run("systemctl", "restart", "koordlet", timeout_s=120)

    def status(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = json.loads(run(KOORDCTL, "status", "-o", "json"))
        return found

    def journal(self, lines: int = 60) -> str:
        return run("journalctl", "-u", "koordlet", "-n", str(lines), "--no-pager", "-o", "cat")


def pools() -> Manifest:
    """The share pools of this machine: one per NUMA node, less the node's first core."""
    found = []
    for folder in sorted(Path("/sys/devices/system/node").glob("node[0-9]*")):
        first, _, last = (folder / "cpulist").read_text().strip().partition("-")
        socket = Path(f"/sys/devices/system/cpu/cpu{first}/topology/physical_package_id")
        found.append(
            {
                "socket": int(socket.read_text()),
                "node": int(folder.name.removeprefix("node")),
                "cpuset": f"{int(first) + 2}-{last}",
            }
        )
    text = json.dumps(found)
    return {
        "apiVersion": "topology.node.k8s.io/v1alpha1",
        "kind": "NodeResourceTopology",
        "metadata": {
            "name": NODE_NAME,
            "annotations": {
                "kubelet.koordinator.sh/cpu-manager-policy": '{"policy":"none"}',
                "node.koordinator.sh/cpu-shared-pools": text,
                "node.koordinator.sh/be-cpu-shared-pools": text,
            },
        },
        "topologyPolicies": ["None"],
        "zones": [],
    }


def install() -> None:
    """The steps of docs/install.md, less the virtual environment that the image stands in for."""
    OBJECTS.mkdir(parents=True, exist_ok=True)
    shutil.copy(CHECKOUT / "systemd/koordlet.service", UNIT)
    shutil.copy(CHECKOUT / "systemd/koordlet.tmpfiles.conf", "/usr/lib/tmpfiles.d/koordlet.conf")
    config = {
        "nodeName": NODE_NAME,
        "objectsDir": str(OBJECTS),
        "featureGates": GATES,
        "http": {"address": "127.0.0.1:9316"},
        "measuring": {"psiInterval": "1s"},
        # A long interval: what is repaired in time was noticed, not stumbled upon.
        "intervals": {"reconcile": 600},
    }
    (ETC / "config.yaml").write_text(yaml.safe_dump(config))
    Service().put(nodeslo(beClass=BE_IDLE, lsClass=LS_PROTECTED), pools())
    run("systemd-tmpfiles", "--create", "koordlet.conf")
    run("systemctl", "daemon-reload")


@contextmanager
def installed() -> Iterator[Service]:
    """The running service; afterwards stopped and gone."""
    install()
    service = Service()
    try:
        service.start()
    except AssertionError as error:
        raise AssertionError(f"{error}\n{service.journal()}") from None
    wait_until(lambda: service.show("ActiveState") == "active", "koordlet is active")
    try:
        yield service
    finally:
        run("systemctl", "stop", "koordlet", check=False, timeout_s=60)
        run("systemctl", "reset-failed", "koordlet", check=False)

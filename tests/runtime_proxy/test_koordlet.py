"""koordlet itself behind the proxy, before real containerd and without NRI: the proxy's own use.

What a hook decided is read from the runtime's own record of the container, because the daemon's
reconciler would mend the kernel's value a moment later anyway.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator

import pytest

from protos.cri.v1 import api_pb2 as cri
from tests.beds.containerd import Containerd, containerd
from tests.beds.daemon import Daemon, daemon
from tests.beds.kubelet import RunningPod, running_pod
from tests.e2e.manifests import Manifest, batch_pod, nodeslo
from tests.runtime_proxy.node import Node, node, with_creations
from tests.runtime_proxy.processes import Proxy
from tests.waiting import wait_until

pytestmark = pytest.mark.containerd

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def runtime() -> Iterator[Containerd]:
    with containerd() as running:
        yield running


@pytest.fixture
def here(runtime: Containerd) -> Iterator[Node]:
    with node(runtime, "--hook-timeout=1s") as made:
        yield made


@pytest.fixture
def koordlet(here: Node) -> Iterator[Daemon]:
    socket = str(here.proxy.folder / "koordlet.sock")
    config = {
        "nri": {"enabled": False},
        "hookService": {
            "enabled": True,
            "socket": socket,
            "hostEndpoint": socket,
            "registrationDir": str(here.proxy.hook_dir),
        },
    }
    with daemon(here.runtime, [nodeslo()], config=config) as running:
        wait_until(lambda: "hook server is registered" in here.proxy.log_text(), "registration")
        yield running


def pod() -> Manifest:
    return batch_pod(f"batch-{next(_numbers)}", cpu="500")


def created_with(here: Node, pod: RunningPod) -> cri.LinuxContainerResources:
    return here.cri.container_status(pod.containers["main"]).status.resources.linux


def test_a_batch_container_is_created_with_what_the_daemon_decided(
    here: Node, koordlet: Daemon
) -> None:
    with running_pod(here.kubelet, pod()) as running:
        found = created_with(here, running)
        assert (found.cpu_quota, found.cpu_shares) == (50_000, 256)
        assert found.memory_limit_in_bytes == 128 << 20
        group = running.container_cgroup("main")
        assert here.runtime.groups.read(group, "cpu.cfs_quota_us") == "50000"


def test_no_pod_fails_whatever_happens_to_the_daemon(here: Node, koordlet: Daemon) -> None:
    made, failed = with_creations(here, pod, lambda: abuse(koordlet))
    assert failed == []
    assert all(count > 1 for count in made)
    wait_until(lambda: decides_again(here), "the daemon to be asked again", timeout_s=20)


def abuse(koordlet: Daemon) -> None:
    """Killed outright, started, hung, let go, ended in order, started."""
    time.sleep(0.7)
    koordlet.stop(signal.SIGKILL)
    time.sleep(0.7)
    koordlet.start()
    time.sleep(0.7)
    os.kill(koordlet.pid, signal.SIGSTOP)
    time.sleep(2)
    os.kill(koordlet.pid, signal.SIGCONT)
    time.sleep(0.7)
    koordlet.stop()
    time.sleep(0.7)
    koordlet.start()
    time.sleep(0.7)


def decides_again(here: Node) -> bool:
    with running_pod(here.kubelet, pod()) as running:
        return created_with(here, running).cpu_quota == 50_000


def test_a_daemon_that_ends_in_order_takes_its_registration_along(
    here: Node, koordlet: Daemon
) -> None:
    koordlet.stop()
    wait_until(lambda: is_forgotten(here.proxy), "the registration to go")
    with running_pod(here.kubelet, pod()) as running:
        assert created_with(here, running).cpu_quota == 0
    koordlet.start()
    wait_until(lambda: decides_again(here), "the daemon to be asked again", timeout_s=20)


def is_forgotten(proxy: Proxy) -> bool:
    return not list(proxy.hook_dir.glob("*.json"))

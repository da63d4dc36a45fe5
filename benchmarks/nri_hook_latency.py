"""How long a container creation waits for us: the whole path over a socket, and Synchronize.

    python -m benchmarks.nri_hook_latency                     our transport, engine and policies
    python -m benchmarks.nri_hook_latency --plugin constant   our transport with a fixed answer
    python -m benchmarks.nri_hook_latency --plugin external   whatever dials the printed socket: the
                                                              daemon, or a plugin on the Go stub

Each request has 30 environment variables, three pod labels and a batch annotation; every container
and pod is new, so no cache of whole objects helps. Figures are printed, never asserted.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from benchmarks.nri_driver import Driver
from hooks.decision import Decision, ResourceKey
from hooks.engine import Engine
from hooks.facts import KernelFacts, NodeInputs, Settings
from hooks.policies import BUILTIN
from linux.resources import Resource
from nri_plugin.capabilities import RuntimeProfile
from nri_plugin.handler import Container, Sandbox
from nri_plugin.options import Options
from nri_plugin.supervisor import Supervisor
from protos.nri.v1alpha1 import nri_pb2 as nri

_VARIANTS = 100
_BATCH = (
    '{"containers":{"main":{"requests":{"kubernetes.io/batch-cpu":"500",'
    '"kubernetes.io/batch-memory":"128Mi"},"limits":{"kubernetes.io/batch-cpu":"%d",'
    '"kubernetes.io/batch-memory":"128Mi"}}}}'
)


class EngineHandler:
    """The engine with all built-in policies, asked for every container; keeps nothing."""

    def __init__(self) -> None:
        gates = {policy.gate: True for policy in BUILTIN}
        self._engine = Engine.build(
            BUILTIN,
            NodeInputs(
                kernel=KernelFacts(supported=frozenset(Resource)),
                settings=Settings(feature_gates=gates),
            ),
        )
        self.resctrl_groups: Collection[str] = ()

    def configured(self, runtime: RuntimeProfile) -> None:
        active = [state.policy.name for state in self._engine.states if state.active]
        print(f"active policies: {', '.join(active)}", file=sys.stderr)

    def synchronize(
        self, sandboxes: Sequence[Sandbox], containers: Sequence[Container]
    ) -> Iterable[tuple[str, Decision]]:
        for container in containers:
            yield container.subject.id, self._engine.decide(container.subject)

    def create_container(self, container: Container) -> Decision | None:
        return self._engine.decide(container.subject)

    def update_container(self, container: Container) -> Decision | None:
        return self._engine.decide(container.subject)

    def unrepairable(self, container: Container, lacks: Sequence[ResourceKey]) -> None: ...
    def run_sandbox(self, sandbox: Sandbox) -> None: ...
    def update_sandbox(self, sandbox: Sandbox) -> None: ...
    def stop_sandbox(self, sandbox: Sandbox) -> None: ...
    def remove_sandbox(self, sandbox: Sandbox) -> None: ...
    def start_container(self, container: Container) -> None: ...
    def container_updated(self, container: Container) -> None: ...
    def stop_container(self, container: Container) -> None: ...
    def remove_container(self, container: Container) -> None: ...
    def disconnected(self, reason: str) -> None: ...


class ConstantHandler(EngineHandler):
    """One decision, made once: what the transport itself costs."""

    def __init__(self) -> None:
        super().__init__()
        self._decision: Decision | None = None

    def create_container(self, container: Container) -> Decision | None:
        if self._decision is None:
            self._decision = self._engine.decide(container.subject)
        return self._decision


def serve(kind: str, socket: str, run_dir: str) -> None:
    """The plugin's process."""
    import uvloop

    async def run() -> None:
        handler = ConstantHandler() if kind == "constant" else EngineHandler()
        options = Options(run_dir=run_dir, socket=socket, first_backoff_s=0.1)
        gc.collect()
        gc.freeze()
        await Supervisor(options, handler).run()

    uvloop.run(run())


PARENT = "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{uid}.slice"


def pod(number: int, parent: str = PARENT) -> nri.PodSandbox:
    """A best-effort pod with batch resources. `parent` is its cgroup, with a place for the UID."""
    uid = f"7712555c-ce62-454a-9e18-{number:012d}"
    in_path = uid.replace("-", "_") if parent.endswith(".slice") else uid
    return nri.PodSandbox(
        id=f"{number:064x}",
        name=f"batch-{number}",
        uid=uid,
        namespace="default",
        labels={
            "koordinator.sh/qosClass": "BE",
            "koordinator.sh/priority-class": "koord-batch",
            "app": f"batch-{number % 50}",
        },
        annotations={
            "node.koordinator.sh/extended-resource-spec": _BATCH % (1000 + number % _VARIANTS),
        },
        linux=nri.LinuxPodSandbox(cgroup_parent=parent.format(uid=in_path)),
    )


def container(number: int, of: nri.PodSandbox) -> nri.Container:
    """A container of a pod, as kubelet asks for one that has no CPU or memory resources."""
    message = nri.Container(
        id=f"{number:063x}c",
        pod_sandbox_id=of.id,
        name="main",
        env=[f"VARIABLE_{n}=a value of usual length, number {n}" for n in range(30)],
        args=["/bin/app", "--flag"],
    )
    parent = of.linux.cgroup_parent
    if parent.endswith(".slice"):
        slice_name = parent.rpartition("/")[2]
        message.linux.cgroups_path = f"{slice_name}:cri-containerd:{message.id}"
    else:
        message.linux.cgroups_path = f"{parent}/{message.id}"
    message.linux.resources.cpu.shares.value = 2
    message.linux.resources.cpu.period.value = 100000
    message.linux.resources.memory.limit.SetInParent()
    return message


def measure_creations(
    driver: Driver, count: int, *, warm_up: int = 1000, parent: str = PARENT, first: int = 0
) -> None:
    """Create containers in pods of their own; the one made 200 before goes away each time."""
    times: list[float] = []
    adjusted = 0
    alive: deque[tuple[nri.PodSandbox, nri.Container]] = deque()
    for number in range(first, first + warm_up + count):
        a_pod = pod(number, parent)
        a_container = container(number, a_pod)
        driver.tell(nri.RUN_POD_SANDBOX, a_pod, None)
        request = nri.CreateContainerRequest(pod=a_pod, container=a_container)
        reply, took = driver.call("CreateContainer", request.SerializeToString())
        if number >= first + warm_up:
            times.append(took)
            adjusted += nri.CreateContainerResponse.FromString(reply).HasField("adjust")
        alive.append((a_pod, a_container))
        if len(alive) > 200:
            old_pod, old_container = alive.popleft()
            driver.tell(nri.REMOVE_CONTAINER, old_pod, old_container)
            driver.tell(nri.REMOVE_POD_SANDBOX, old_pod, None)
    times.sort()

    def at(part: float) -> float:
        return times[min(int(part * len(times)), len(times) - 1)] * 1e6

    print(
        f"CreateContainer: {count} calls, {request.ByteSize()} bytes each, {adjusted} adjusted:"
        f" p50 {at(0.5):.0f} us, p99 {at(0.99):.0f} us, p99.9 {at(0.999):.0f} us,"
        f" worst {times[-1] * 1e3:.2f} ms",
        flush=True,
    )


def measure_synchronize(driver: Driver, count: int) -> None:
    """Containers that have what they should have, but for one in a hundred."""
    settled: list[nri.LinuxResources] = []
    for variant in range(_VARIANTS):
        a_pod = pod(variant)
        request = nri.CreateContainerRequest(pod=a_pod, container=container(variant, a_pod))
        reply, _ = driver.call("CreateContainer", request.SerializeToString())
        settled.append(nri.CreateContainerResponse.FromString(reply).adjust.linux.resources)
    pods = [pod(number) for number in range(count // 2)]
    containers = []
    for number in range(count):
        message = container(number, pods[number // 2])
        if number % 100:
            message.linux.resources.MergeFrom(settled[number // 2 % _VARIANTS])
        containers.append(message)
    seconds, slices, response = driver.synchronize(pods, containers)
    print(
        f"Synchronize: {count} containers in {slices} message(s): {seconds * 1e3:.0f} ms,"
        f" {len(response.update)} updates asked"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--plugin", default="policies", choices=["policies", "constant", "external"]
    )
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--socket", default="")
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    parser.add_argument("--run-dir", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.socket, options.run_dir)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = options.socket or str(Path(folder) / "nri.sock")
        driver = Driver(path)
        child: subprocess.Popen[bytes] | None = None
        if options.plugin == "external":
            print(f"waiting for a plugin at {path}", flush=True)
        else:
            command = [sys.executable, "-m", "benchmarks.nri_hook_latency"]
            command += ["--serve", options.plugin, "--socket", path, "--run-dir", folder]
            child = subprocess.Popen(command, env={**os.environ})
        try:
            driver.accept(timeout_s=600.0 if child is None else 30.0)
            driver.synchronize([], [])
            measure_creations(driver, options.count)
            measure_synchronize(driver, 1000)
            measure_synchronize(driver, 10000)
        finally:
            driver.close()
            if child is not None:
                child.terminate()
                child.wait(10)


if __name__ == "__main__":
    main()

"""How long a container creation waits for the handler alone, without kernel files and reconciler;
and Synchronize. `benchmarks.nri_hook_latency` measures the whole daemon.

    python -m benchmarks.nri_creations                     the daemon's handler, all policies
    python -m benchmarks.nri_creations --plugin constant   our transport with a fixed answer
    python -m benchmarks.nri_creations --plugin external   any plugin that dials the printed socket
    python -m benchmarks.nri_creations --beside './plugin --socket {socket}'
                                                           ours, a constant, and another plugin,
                                                           in turns, and the ratios

Each request has 30 environment variables, three pod labels and a batch annotation; every container
and pod is new, so no cache of whole objects helps. As in a real creation, the event of the
sandbox came before. Figures are printed, never asserted.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import shlex
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import psutil

from benchmarks.nri_driver import Driver
from benchmarks.nri_messages import PARENT, VARIANTS, container, pod
from benchmarks.quantiles import quantile
from benchmarks.running import ended_with_block, run_main
from hooks.decision import Decision
from hooks.engine import Engine
from hooks.facts import KernelFacts, NodeInputs, Settings
from hooks.observed import Container
from hooks.policies import BUILTIN
from koordlet.decisions.decider import Decider
from koordlet.state import NodeState
from koordlet.state.requests_log import RequestsLog
from koordlet.transports.nri_handler import NriHandler
from linux.resources import Resource, Value
from nri_plugin.options import Options
from nri_plugin.supervisor import Supervisor
from protos.nri.v1alpha1 import nri_pb2 as nri
from service.events import Events


class Node:
    """What the daemon's handler has around it, less the reconciler and the disks."""

    def __init__(self) -> None:
        gates = {policy.gate: True for policy in BUILTIN}
        self.engine = Engine.build(
            BUILTIN,
            NodeInputs(
                kernel=KernelFacts(supported=frozenset(Resource)),
                settings=Settings(feature_gates=gates),
            ),
        )

    def after_reply(self, work: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(work)

    later = after_reply

    def resctrl_groups(self) -> Collection[str]:
        return ()

    def state_changed(self, reason: str) -> None: ...
    def pod_changed(self, uid: str, *, can_wait: bool = False) -> None: ...
    def pod_appeared(self, uid: str) -> None: ...
    def container_complete(self, uid: str) -> None: ...
    def requested(self, cgroup: str) -> None: ...

    def superseded(self, container_id: str, resources: Collection[Resource]) -> None: ...

    def make_host_directory(self, path: str, mode: int) -> None: ...
    def ended(self, container_id: str) -> None: ...
    def delivered(
        self,
        container_id: str,
        resource: Resource,
        requested: Value | None,
        value: Value,
        policy: str,
    ) -> None: ...


class Handler(NriHandler):
    """The daemon's handler, its state, and the engine with all built-in policies."""

    def __init__(self, run_dir: str) -> None:
        node, events = Node(), Events()
        active = [state.policy.name for state in node.engine.states if state.active]
        print(f"active policies: {', '.join(active)}", file=sys.stderr)
        state = NodeState()
        super().__init__(
            state=state,
            decider=Decider(events, later=node.after_reply),
            events=events,
            requests=RequestsLog(f"{run_dir}/requests.log", state.all_remembered),
            surroundings=node,
        )


class ConstantHandler(Handler):
    """One decision, made once, and nothing remembered: what the transport itself costs."""

    _decision: Decision | None = None

    def create_container(self, container: Container) -> Decision | None:
        if self._decision is None:
            self._decision = super().create_container(container)
        return self._decision


def serve(kind: str, socket: str, run_dir: str) -> None:
    """The plugin's process."""
    import uvloop

    async def run() -> None:
        handler = ConstantHandler(run_dir) if kind == "constant" else Handler(run_dir)
        options = Options(run_dir=run_dir, socket=socket, first_backoff_s=0.1)
        gc.collect()
        gc.freeze()
        await Supervisor(options, handler).run()

    uvloop.run(run())


class Creations:
    """Containers created in pods of their own; the one made 200 before goes away each time."""

    def __init__(self, driver: Driver, *, parent: str = PARENT, first: int = 0) -> None:
        self._driver = driver
        self._parent = parent
        self._number = first
        self._sandboxes: deque[nri.PodSandbox] = deque()
        self._alive: deque[tuple[nri.PodSandbox, nri.Container]] = deque()
        self.request_bytes = 0
        self.adjusted = 0
        self.seconds: list[float] = []

    def run(self, count: int) -> None:
        """Create `count` containers and time each reply."""
        for _ in range(count):
            self.seconds.append(self._create())

    def skip(self, count: int) -> None:
        """Create `count` containers that do not count."""
        adjusted = self.adjusted
        for _ in range(count):
            self._create()
        self.adjusted = adjusted

    def _create(self) -> float:
        """As on a node: sandboxes first, other pods' events in between, then the container."""
        driver = self._driver
        while len(self._sandboxes) < 10:
            self._sandboxes.append(pod(self._number, self._parent))
            driver.tell(nri.RUN_POD_SANDBOX, self._sandboxes[-1], None)
            self._number += 1
        if len(self._alive) >= 200:
            old_pod, old_container = self._alive.popleft()
            driver.tell(nri.REMOVE_CONTAINER, old_pod, old_container)
            driver.tell(nri.REMOVE_POD_SANDBOX, old_pod, None)
        a_pod = self._sandboxes.popleft()
        a_container = container(int(a_pod.id, 16), a_pod)
        self._alive.append((a_pod, a_container))
        request = nri.CreateContainerRequest(pod=a_pod, container=a_container).SerializeToString()
        reply, took = driver.call("CreateContainer", request)
        self.request_bytes = len(request)
        self.adjusted += nri.CreateContainerResponse.FromString(reply).HasField("adjust")
        return took

    def at(self, part: float) -> float:
        """Return a quantile in microseconds."""
        return quantile(self.seconds, part) * 1e6

    def __str__(self) -> str:
        return (
            f"{len(self.seconds)} calls, {self.request_bytes} bytes each, {self.adjusted} adjusted:"
            f" p50 {self.at(0.5):.0f} us, p99 {self.at(0.99):.0f} us,"
            f" p99.9 {self.at(0.999):.0f} us, worst {max(self.seconds) * 1e3:.2f} ms"
        )


def measure_creations(
    driver: Driver, count: int, *, warm_up: int = 1000, parent: str = PARENT, first: int = 0
) -> None:
    creations = Creations(driver, parent=parent, first=first)
    creations.skip(warm_up)
    creations.run(count)
    print(f"CreateContainer: {creations}", flush=True)


def measure_synchronize(driver: Driver, count: int) -> None:
    """Containers that have what they should have, but for one in a hundred."""
    settled: list[nri.LinuxResources] = []
    for variant in range(VARIANTS):
        a_pod = pod(variant)
        request = nri.CreateContainerRequest(pod=a_pod, container=container(variant, a_pod))
        reply, _ = driver.call("CreateContainer", request.SerializeToString())
        settled.append(nri.CreateContainerResponse.FromString(reply).adjust.linux.resources)
    pods = [pod(number) for number in range(count // 2)]
    containers = []
    for number in range(count):
        message = container(number, pods[number // 2])
        if number % 100:
            message.linux.resources.MergeFrom(settled[number // 2 % VARIANTS])
        containers.append(message)
    seconds, slices, response = driver.synchronize(pods, containers)
    print(
        f"Synchronize: {count} containers in {slices} message(s): {seconds * 1e3:.0f} ms,"
        f" {len(response.update)} updates asked"
    )


_TURN = 250


def started(command: list[str]) -> AbstractContextManager[psutil.Popen]:
    """A plugin's process."""
    return ended_with_block(psutil.Popen(command, stderr=subprocess.DEVNULL))


def ours(kind: str, socket: str, folder: str) -> list[str]:
    """The command of a plugin of ours."""
    command = [sys.executable, "-m", "benchmarks.nri_creations", "--serve", kind]
    return [*command, "--socket", socket, "--run-dir", folder]


def measure_beside(other: str, count: int, folder: str) -> None:
    """Several plugins, a turn each, so that what disturbs the machine disturbs all of them."""
    with ExitStack() as stack:
        plugins: dict[str, Creations] = {}
        for name in ("policies", "constant", "other"):
            own = Path(folder) / name
            own.mkdir()
            socket = str(own / "nri.sock")
            driver = Driver(socket)
            stack.callback(driver.close)
            if name == "other":
                command = [part.replace("{socket}", socket) for part in shlex.split(other)]
            else:
                command = ours(name, socket, str(own))
            stack.enter_context(started(command))
            driver.accept(timeout_s=30.0)
            driver.synchronize([], [])
            plugins[name] = Creations(driver)
            plugins[name].skip(1000)
        for _ in range(max(count // _TURN, 1)):
            for creations in plugins.values():
                creations.skip(10)  # the caches are the other plugins'
                creations.run(_TURN)
        for name, creations in plugins.items():
            ratio = creations.at(0.5) / plugins["other"].at(0.5)
            print(f"{name:9s} {creations}; p50 is {ratio:.2f} of the other's", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--plugin", default="policies", choices=["policies", "constant", "external"]
    )
    parser.add_argument("--beside", default="", metavar="COMMAND")
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--socket", default="")
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    parser.add_argument("--run-dir", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.socket, options.run_dir)
        return
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if options.beside:
            measure_beside(options.beside, options.count, folder)
            return
        path = options.socket or str(Path(folder) / "nri.sock")
        driver = Driver(path)
        stack.callback(driver.close)
        patience_s = 30.0
        if options.plugin == "external":
            print(f"waiting for a plugin at {path}", flush=True)
            patience_s = 600.0
        else:
            stack.enter_context(started(ours(options.plugin, path, folder)))
        driver.accept(timeout_s=patience_s)
        driver.synchronize([], [])
        measure_creations(driver, options.count)
        measure_synchronize(driver, 1000)
        measure_synchronize(driver, 10000)


if __name__ == "__main__":
    run_main(main)

"""What koordlet costs over an hour on a full node on which pods come and go, beside a Go plugin.

    python -m benchmarks.node_soak --minutes 60 --other './constant -socket {socket}'
    python -m benchmarks.node_soak --other 'python -m benchmarks.bare_plugin {socket}' \
        --other './constant -socket {socket}'                   and our transport alone
    python -m benchmarks.node_soak --minutes 5 --lives 500 --all-collectors

A whole `koordlet run` with real cgroups: 110 best-effort pods with two containers each run all the
time, measured every second by the default collectors, with the default strategies on; beside them
pods live and end, `--lives` of them spread evenly over the time. Between koordlet's lives the other
plugins live the same ones in groups of their own, in turns (which plugins, and what a life is,
stands in `benchmarks.nri_hook_latency`). A container is created as long after its sandbox as on a
real runtime (`--gap`). Needs root.

With `--all-collectors` the gates of all collectors are on, each reads at every second where it has
an interval of its own to set (events are counted for 10 s of each minute, as always), and each
container that stays has a process: every tenth starts a program twice a second, the others sleep.
Which collectors the machine could carry, what each one's last round took, and why another is
unavailable, is printed before the figures and after them.

With `--loop-steps` each step of koordlet's event loop is measured (`benchmarks.loop_steps`): the
daemon is slower then, and its figures do not count.

A line every `--every` minutes: koordlet's share of one core, resident memory and open files, the
duration of a sampling round, and CreateContainer of all plugins since the line before. The last
lines: the whole time, and what the run directory has grown to. To reach: 3 % of one core and 120 MB
after an hour, and CreateContainer's p99 at most 1.2 times the Go plugin's.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
import yaml

from benchmarks import loop_steps
from benchmarks.nri_driver import Driver
from benchmarks.pod_lives import GAP_MS, Lives
from benchmarks.quantiles import quantile
from benchmarks.running import ended_with_block, run_main, started_apart
from benchmarks.whole_daemon import (
    IN_MEMORY,
    KOORDLET,
    cpu_seconds,
    koordlet,
    node,
    processes,
    resident_mb,
)
from koordctl.client import Client
from tests.beds.groups import Kubepods, kubepods

_NODE: Final = "bench-node"
_TURN: Final = 20
"""Lives of one plugin before the other's turn: short, so that both see the same minutes."""
_FIRST: Final = 10_000
"""The number of the first pod that lives and ends, beyond those that stay."""
_ALIVE: Final = 10
"""Pods beside those that stay: each life ends the oldest of them."""
_LONG_STEP_S: Final = 0.01
"""What a step of the event loop is to stay below."""
_START_S: Final = 10.0
"""The start is not part of the cost."""
_BUSY: Final = 10
"""With --all-collectors one container in so many works. Chosen: most containers of a node wait."""
_GATES: Final = (
    "PSICollector",
    "CPICollector",
    "ColdPageCollector",
    "ResctrlCollector",
    "Accelerators",
    "RDMADevices",
)
"""All gates of collectors, and of the devices that they find."""
_EACH_SECOND: Final = {
    "psiInterval": "1s",
    "coldPageInterval": "1s",
    "resctrl": True,
    "resctrlInterval": "1s",
}


@dataclass(slots=True)
class _Plugin:
    lives: Lives
    seconds: list[float] = field(default_factory=list)
    """CreateContainer of all lives so far."""

    def turn(self, every_s: float) -> None:
        """Begin a life every `every_s` seconds, `_TURN` times."""
        self.lives.seconds.clear()
        due = time.monotonic()
        for _ in range(_TURN):
            time.sleep(max(due - time.monotonic(), 0.0))
            self.lives.run(1)
            due += every_s
        time.sleep(max(due - time.monotonic(), 0.0))
        self.seconds += self.lives.seconds["CreateContainer"]


@dataclass(slots=True)
class _Cost:
    """What koordlet used since `begun`."""

    process: psutil.Process
    client: Client
    begun: float = 0.0
    busy_s: float = 0.0
    rounds_ms: list[float] = field(default_factory=list)

    def begin(self) -> None:
        self.begun, self.busy_s = time.monotonic(), cpu_seconds(self.process)

    def look(self) -> None:
        self.rounds_ms.append(self.client.get("/status")["measuring"]["lastRoundMs"])

    def text(self) -> str:
        share = (cpu_seconds(self.process) - self.busy_s) / (time.monotonic() - self.begun)
        return (
            f"{share:.2%} of a core, {resident_mb(self.process):.1f} MB,"
            f" {self.process.num_fds()} files, round p50 {quantile(self.rounds_ms, 0.5):.1f}"
            f" p99 {quantile(self.rounds_ms, 0.99):.1f} ms"
        )


def main() -> None:
    options = _options()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=IN_MEMORY)))
        steps = folder / "steps.json" if options.loop_steps else None
        ours, cost = _koordlet(stack, folder, options, steps=steps)
        plugins = [ours]
        for number, command in enumerate(options.other):
            # A folder of its own: a daemon with our transport locks the folder of its socket.
            (folder / f"other{number}").mkdir()
            socket = folder / f"other{number}" / "nri.sock"
            plugins.append(_other(stack, socket, command, options))
        for plugin in plugins:
            plugin.lives.fill()
        time.sleep(_START_S)
        print(f"{options.pods} pods that stay, {os.cpu_count()} CPUs", flush=True)
        if options.all_collectors:
            _collectors(cost.client)
        _live(plugins, cost, options)
        if options.all_collectors:
            _collectors(cost.client)
        if steps is not None:
            _loop(steps)
        grown = sum(each.stat().st_size for each in (folder / "run").rglob("*") if each.is_file())
        status = cost.client.get("/status")
        print(
            f"run directory {grown / 1e6:.2f} MB, kernel refused {status['reconciler']['failed']}"
        )


def _live(plugins: list[_Plugin], cost: _Cost, options: argparse.Namespace) -> None:
    ours = plugins[0]
    every_s = options.minutes * 60 / options.lives / len(plugins)
    cost.begin()
    part = _Cost(cost.process, cost.client)
    part.begin()
    since = [0] * len(plugins)
    while len(ours.seconds) < options.lives:
        for plugin in plugins:
            plugin.turn(every_s)
        part.look()
        if time.monotonic() - part.begun < options.every * 60:
            continue
        minutes = (time.monotonic() - cost.begun) / 60
        print(f"{minutes:5.1f} min, load {os.getloadavg()[0]:4.1f}: {part.text()}")
        _creations([each.seconds[n:] for each, n in zip(plugins, since, strict=True)])
        cost.rounds_ms += part.rounds_ms
        part = _Cost(cost.process, cost.client)
        part.begin()
        since = [len(each.seconds) for each in plugins]
    cost.rounds_ms += part.rounds_ms
    print(f"whole time, {len(ours.seconds)} lives: {cost.text()}")
    _creations([each.seconds for each in plugins])


def _creations(seconds: list[list[float]]) -> None:
    """Print CreateContainer of koordlet, and its ratio to each other plugin's, in their order."""
    ours = seconds[0]
    text = (
        f"    CreateContainer p50 {quantile(ours, 0.5) * 1e6:.0f} us,"
        f" p99 {quantile(ours, 0.99) * 1e3:.2f} ms, worst {max(ours) * 1e3:.1f} ms"
    )
    for others in seconds[1:]:
        ratios = [quantile(ours, part) / quantile(others, part) for part in (0.5, 0.99)]
        text += f"; of another's ({quantile(others, 0.5) * 1e6:.0f} us,"
        text += f" {quantile(others, 0.99) * 1e3:.2f} ms): p50 {ratios[0]:.2f}, p99 {ratios[1]:.2f}"
    print(text, flush=True)


def _collectors(client: Client) -> None:
    """Print each collector with its last round, or with what it lacks."""
    for each in client.get("/status")["measuring"]["collectors"]:
        text = f"    collector {each['name']}: {each['state']}"
        if each["state"] == "ready":
            text += f", every {each['intervalSeconds']:g} s, {each['series']} series"
            text += f", last round {each['tookMs']:.1f} ms"
        print(text + (f": {each['error']}" if each["error"] else ""), flush=True)


def _loop(saved: Path) -> None:
    """Print the steps of koordlet's event loop, its start included."""
    steps = loop_steps.read(saved)
    for what, seconds in (("CPU", steps.cpu), ("elapsed", steps.elapsed)):
        longer = sum(each > _LONG_STEP_S for each in seconds)
        print(
            f"steps of the event loop, {what}: {len(seconds)}, p50"
            f" {quantile(seconds, 0.5) * 1e6:.0f} us, p99 {quantile(seconds, 0.99) * 1e3:.2f} ms,"
            f" worst {seconds[-1] * 1e3:.1f} ms, {longer} above {_LONG_STEP_S * 1e3:.0f} ms"
        )
    names = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for seconds, name in steps.longest)
    print(f"    most CPU: {names}", flush=True)


def _koordlet(
    stack: ExitStack, folder: Path, options: argparse.Namespace, *, steps: Path | None
) -> tuple[_Plugin, _Cost]:
    """steps: where the daemon saves the steps of its event loop; None: they are not measured."""
    groups = stack.enter_context(kubepods())
    for part in ("objects", "run"):
        (folder / part).mkdir(mode=0o755)
    slo = {
        "apiVersion": "slo.koordinator.sh/v1alpha1",
        "kind": "NodeSLO",
        "metadata": {"name": _NODE},
        "spec": {
            "resourceUsedThresholdWithBE": {"enable": True},
            "cpuBurstStrategy": {"policy": "auto"},
        },
    }
    (folder / "objects" / "nodeslo.yaml").write_text(yaml.safe_dump(slo))
    config: dict[str, Any] = {
        "nodeName": _NODE,
        "nri": {"socket": str(folder / "nri.sock")},
        "objectsDir": str(folder / "objects"),
        "runDir": str(folder / "run"),
        "kubepodsRoot": groups.path.strip("/"),
        "http": {"address": ""},
    }
    if options.all_collectors:
        config["featureGates"] = dict.fromkeys(_GATES, True)
        config["measuring"] = _EACH_SECOND
    pods, containers = node(groups, options.pods)
    if options.all_collectors:
        stack.enter_context(processes(groups, containers, busy=len(containers) // _BUSY))
    driver = Driver(str(folder / "nri.sock"))
    stack.callback(driver.close)
    code = loop_steps.program(steps, Path(__file__).parents[1]) if steps else KOORDLET
    process = stack.enter_context(koordlet(folder, config, log=folder / "log", code=code))
    driver.accept()
    driver.synchronize(pods, containers)
    return _plugin(driver, groups, options), _Cost(process, Client(str(folder / "run")))


def _other(stack: ExitStack, socket: Path, command: str, options: argparse.Namespace) -> _Plugin:
    groups = stack.enter_context(kubepods())
    driver = Driver(str(socket))
    stack.callback(driver.close)
    words = [part.replace("{socket}", str(socket)) for part in shlex.split(command)]
    process = started_apart(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.enter_context(ended_with_block(process))
    driver.accept()
    driver.synchronize([], [])
    return _plugin(driver, groups, options)


def _plugin(driver: Driver, groups: Kubepods, options: argparse.Namespace) -> _Plugin:
    gap_s = options.gap / 1e3
    return _Plugin(Lives(driver, groups, alive=_ALIVE, first=_FIRST, gap_s=gap_s))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--other",
        action="append",
        default=[],
        metavar="COMMAND",
        help="a plugin to compare with; may be repeated; see above",
    )
    parser.add_argument("--pods", type=int, default=110, help="that stay (%(default)s)")
    parser.add_argument("--lives", type=int, default=10_000, help="of each plugin (%(default)s)")
    parser.add_argument(
        "--gap",
        type=float,
        default=GAP_MS,
        metavar="MS",
        help="from the reply to RunPodSandbox to CreateContainer (%(default)g)",
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="in all (%(default)s)")
    parser.add_argument("--every", type=float, default=5.0, help="minutes a line (%(default)s)")
    parser.add_argument(
        "--all-collectors", action="store_true", help="run every collector; see above"
    )
    parser.add_argument(
        "--loop-steps", action="store_true", help="measure the event loop; see above"
    )
    return parser.parse_args()


if __name__ == "__main__":
    run_main(main)

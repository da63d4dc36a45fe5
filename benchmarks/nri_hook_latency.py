"""How long a runtime waits for the whole daemon, and for a Go plugin, while pods live and end.

    python -m benchmarks.nri_hook_latency                       koordlet alone
    python -m benchmarks.nri_hook_latency --other './constant -socket {socket}'
                                                                and a Go plugin, in turns
    python -m benchmarks.nri_hook_latency --other ... --load    with one burnt core and a NodeSLO
                                                                that changes every second
    python -m benchmarks.nri_hook_latency --other 'python -m benchmarks.bare_plugin {socket}' \
        --other './constant -socket {socket}'                   and our transport alone
    python -m benchmarks.nri_hook_latency --pod-values          when pod-level values are in force
    python -m benchmarks.nri_hook_latency --python /usr/bin/python3.11 --python .venv/bin/python
                                                                two interpreters, or two versions

A driver in the place of containerd lives whole pod lives (`benchmarks.pod_lives`): sandbox,
creation, start, every fifth container updated, an old pod ended, with real cgroups below a group
that is made for it and removed at the end. Needs root.

koordlet has all built-in policies that the kernel carries, and --pods pods to look after. The
driver, each plugin and the process that burns a core have CPU groups of their own, as on a node.
The plugins take turns of --turn lives, so that what disturbs the machine disturbs all of them;
koordlet finishes what it has left to do before the other's turn, and its NodeSLO changes in its own
turns only. Each figure is also given as a ratio to the last --other, over all turns and as the
median and the range of the turns' own ratios.

The Go plugin to compare with is built outside of this checkout: a module that requires
github.com/containerd/nri (`go get github.com/containerd/nri`), whose plugin answers CreateContainer
with one constant adjustment (shares, quota, memory limit) and every other event with nothing, and
which subscribes to RunPodSandbox, StopPodSandbox, RemovePodSandbox, CreateContainer,
PostStartContainer, UpdateContainer, PostUpdateContainer, StopContainer and RemoveContainer.
The command gets the socket in the place of {socket}.

Figures are printed, never asserted. `benchmarks.nri_creations` measures the handler alone.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import psutil
import yaml

from benchmarks.nri_driver import Driver
from benchmarks.pod_lives import GAP_MS, Lives
from benchmarks.quantiles import quantile
from benchmarks.running import ended_with_block, run_main, started_apart
from benchmarks.whole_daemon import IN_MEMORY, cpu_seconds, koordlet, resident_mb
from tests.beds.groups import kubepods

_NODE: Final = "bench-node"
_SETTLE_S: Final = 0.4
"""After a turn: long enough for the passes that it set off, which are part of its cost."""
_NODESLO_EVERY_S: Final = 1.0
_CALLS: Final = ("CreateContainer", "RUN_POD_SANDBOX", "POST_START_CONTAINER", "UpdateContainer")


class NodeSlo:
    """The NodeSLO in a daemon's objects directory; changes every second while `busy`."""

    def __init__(self, objects: Path) -> None:
        self._objects = objects
        self._turn = 0
        self._stop = threading.Event()
        self.busy = threading.Event()
        self.write()
        self._thread = threading.Thread(target=self._change, daemon=True)
        self._thread.start()

    def write(self) -> None:
        """Write another NodeSLO: every policy's rule is parsed and every pod decided again."""
        self._turn += 1
        qos = {"cpuQOS": {"enable": True, "groupIdentity": -(self._turn % 2)}}
        manifest = {
            "apiVersion": "slo.koordinator.sh/v1alpha1",
            "kind": "NodeSLO",
            "metadata": {"name": _NODE},
            "spec": {"resourceQOSStrategy": {"beClass": qos}},
        }
        scratch = self._objects / ".nodeslo"
        scratch.write_text(yaml.safe_dump(manifest))
        scratch.rename(self._objects / "nodeslo.yaml")

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _change(self) -> None:
        while not self._stop.wait(_NODESLO_EVERY_S):
            if self.busy.is_set():
                self.write()


class Plugin:
    """One plugin that takes turns, and what they took."""

    def __init__(self, name: str, lives: Lives, process: psutil.Process) -> None:
        self.name = name
        self.lives = lives
        self.process = process
        self.slo: NodeSlo | None = None
        self.calls: dict[str, list[float]] = {call: [] for call in _CALLS}
        self.turns: list[list[float]] = []
        """The creations of each turn."""
        self.lived = 0
        self.busy_s = 0.0

    def turn(self, count: int, *, pause_s: float, load: bool) -> None:
        """Live `count` lives, and wait until what they set off is done."""
        self.lives.seconds.clear()
        before = cpu_seconds(self.process)
        if self.slo is not None and load:
            self.slo.busy.set()
        self.lives.run(count, pause_s=pause_s)
        if self.slo is not None:
            self.slo.busy.clear()
        time.sleep(_SETTLE_S)
        self.busy_s += cpu_seconds(self.process) - before
        self.lived += count
        self.turns.append(list(self.lives.seconds["CreateContainer"]))
        for call, taken in self.calls.items():
            taken += self.lives.seconds[call]


def main() -> None:
    options = _options()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=IN_MEMORY)))
        plugins = [
            _koordlet(stack, folder / f"koordlet-{number}", python, options)
            for number, python in enumerate(options.python or [sys.executable])
        ]
        plugins += [
            _other(stack, folder / f"other-{number}", command, options)
            for number, command in enumerate(options.other or ())
        ]
        for plugin in plugins:
            plugin.lives.fill()
        time.sleep(2)
        if options.load:
            stack.enter_context(_burnt_core())
        if options.pod_values:
            for plugin in plugins:
                if plugin.slo is not None:
                    _pod_values(plugin, options.lives, options.pause_ms / 1e3)
            return
        warm_up = min(100, options.turn)
        for plugin in plugins:
            plugin.lives.run(warm_up)
        for _ in range(max(options.lives // options.turn, 1)):
            for plugin in plugins:
                plugin.turn(options.turn, pause_s=options.pause_ms / 1e3, load=options.load)
        _report(plugins)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--other",
        action="append",
        metavar="COMMAND",
        help="a plugin to compare with; several take turns; see above",
    )
    parser.add_argument(
        "--load",
        action="store_true",
        help="one core is burnt by another process, and the NodeSLO changes every second",
    )
    parser.add_argument("--lives", type=int, default=2000, help="of each plugin (%(default)s)")
    parser.add_argument("--turn", type=int, default=100, help="lives in a turn (%(default)s)")
    parser.add_argument(
        "--pods", type=int, default=50, help="pods that run at a time (%(default)s)"
    )
    parser.add_argument(
        "--gap",
        type=float,
        default=GAP_MS,
        metavar="MS",
        help="from the reply to RunPodSandbox to CreateContainer; 0: at once (%(default)g)",
    )
    parser.add_argument(
        "--pause-ms",
        type=float,
        default=0.0,
        help="between two lives (%(default)s: the next begins at once, which a runtime cannot do)",
    )
    parser.add_argument(
        "--python",
        action="append",
        metavar="PATH",
        help="the interpreter of an environment with a koordlet; several take turns (this one)",
    )
    parser.add_argument(
        "--pod-values",
        action="store_true",
        help="measure how long after the reply to RunPodSandbox the pod's group has its quota",
    )
    parser.add_argument("--keep-log", default="", metavar="PATH", help="where koordlet logs to")
    return parser.parse_args()


def _koordlet(stack: ExitStack, folder: Path, python: str, options: argparse.Namespace) -> Plugin:
    groups = stack.enter_context(kubepods())
    for part in ("objects", "run"):
        (folder / part).mkdir(parents=True)
    slo = NodeSlo(folder / "objects")
    stack.callback(slo.close)
    config: dict[str, Any] = {
        "nodeName": _NODE,
        "nri": {"socket": str(folder / "nri.sock")},
        "objectsDir": str(folder / "objects"),
        "runDir": str(folder / "run"),
        "kubepodsRoot": groups.path.strip("/"),
        "http": {"address": ""},
        "featureGates": {"CPUNormalization": True, "GPUEnvInject": True, "OOMScoreAdj": True},
    }
    driver = Driver(str(folder / "nri.sock"))
    stack.callback(driver.close)
    log = Path(options.keep_log or folder / "log")
    process = stack.enter_context(koordlet(folder, config, log=log, python=python))
    _begin(driver)
    plugin = Plugin(
        f"koordlet ({python})" if options.python else "koordlet",
        Lives(driver, groups, alive=options.pods, gap_s=options.gap / 1e3),
        process,
    )
    plugin.slo = slo
    return plugin


def _other(stack: ExitStack, folder: Path, command: str, options: argparse.Namespace) -> Plugin:
    groups = stack.enter_context(kubepods())
    folder.mkdir()
    socket = str(folder / "nri.sock")
    driver = Driver(socket)
    stack.callback(driver.close)
    words = [part.replace("{socket}", socket) for part in shlex.split(command)]
    process = started_apart(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.enter_context(ended_with_block(process))
    _begin(driver)
    name = "other" if len(options.other) == 1 else command
    lives = Lives(driver, groups, alive=options.pods, gap_s=options.gap / 1e3)
    return Plugin(name, lives, process)


def _begin(driver: Driver) -> None:
    driver.accept(timeout_s=30.0)
    driver.synchronize([], [])


@contextmanager
def _burnt_core() -> Iterator[None]:
    """A process that never sleeps."""
    with ended_with_block(started_apart([sys.executable, "-c", "while True: pass"])):
        yield


def _pod_values(plugin: Plugin, count: int, pause_s: float) -> None:
    delays = []
    for _ in range(count):
        delays.append(plugin.lives.pod_value_delay())
        time.sleep(pause_s)
    print(
        f"{plugin.name}: the pod's group has its quota after p50 {quantile(delays, 0.5) * 1e3:.2f}"
        f" ms, p99 {quantile(delays, 0.99) * 1e3:.2f} ms, worst {max(delays) * 1e3:.2f} ms"
        f" ({count} pods)",
        flush=True,
    )


def _report(plugins: list[Plugin]) -> None:
    base = plugins[-1]
    for plugin in plugins:
        print(
            f"{plugin.name}: {plugin.lived} lives, {plugin.lives.adjusted} creations adjusted,"
            f" {plugin.busy_s / plugin.lived * 1e3:.2f} ms of CPU a life,"
            f" {resident_mb(plugin.process):.0f} MB resident"
        )
        for call, taken in plugin.calls.items():
            if not taken:
                continue
            line = (
                f"  {call.lower().replace('_', ''):18s} p50 {quantile(taken, 0.5) * 1e6:4.0f} us,"
                f" p99 {quantile(taken, 0.99) * 1e3:6.2f} ms, worst {max(taken) * 1e3:6.2f} ms"
            )
            if plugin is not base and (others := base.calls[call]):
                ratios = [
                    f"{name} {quantile(taken, part) / quantile(others, part):.2f}"
                    for name, part in (("p50", 0.5), ("p99", 0.99))
                ]
                line += f"; of {base.name}'s: {', '.join(ratios)}"
            print(line)
        if plugin is not base:
            for name, part in (("p50", 0.5), ("p99", 0.99)):
                turns = [
                    quantile(ours, part) / quantile(others, part)
                    for ours, others in zip(plugin.turns, base.turns, strict=True)
                ]
                print(
                    f"  creations turn by turn: {name} {statistics.median(turns):.2f} of"
                    f" {base.name}'s ({min(turns):.2f} to {max(turns):.2f}, {len(turns)} turns)"
                )


if __name__ == "__main__":
    run_main(main)

"""Two schedulers for a while on a cluster that never stands still, and what is wrong afterwards.

    python -m benchmarks.scheduler_soak [--minutes 15] [--nodes 500] [--pods 3000] [--rate 20]

A real API server and etcd. Pods of irregular kinds (`benchmarks.soak_kinds`) come and go; nodes are
added, deleted, tainted, cordoned and resized, quotas edited, GPUs broken, reservations made
(`benchmarks.soak_life`). In the first half the leading scheduler and the API server are killed or
stopped in turns; the second half shows whether memory stays flat: the report has the resident
memory of the program that led the longest, minute by minute, and its growth. After every
`--every` seconds the life is calm until nothing is tried any more; then `benchmarks.soak_oracle`
looks for anything that is given twice and for pods that wait although a node takes them, and the
leader's tables are compared with the API server.

Prints a line for each sample and violation to standard error, and one JSON line of figures. Ends
with status 1 if anything was wrong. The schedulers, API server, etcd and this program share the
machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil
import uvloop

from benchmarks.running import run_main
from benchmarks.soak_life import Life
from benchmarks.soak_oracle import Plain, Room, Seen, bound, key_of, violations, waiting
from cluster.scheduler.manifests import configuration, rbac
from kube.kept_client import KeptClient
from tests.beds.apiserver import ApiServer, api_server
from tests.cluster.conftest import NAMESPACE, grant, install
from tests.ports import free_ports

_USER: Final = "koord-scheduler"
_SAMPLE_S: Final = 10.0
_LONGEST_CALM_S: Final = 180.0
"""Until nothing is tried any more. The longest back-off is 10 s, and gangs wait 20 s for members;
a pod that fits nowhere is tried a few times."""
_STILL_S: Final = 12.0
"""Nothing happened for so long: a little more than the longest back-off."""
_NOT_RENEWED: Final = "was not renewed; exiting so that another replica can lead"
_PLACES: Final = ("active", "backoff")
_SIZES: Final = ("nodes", "pods", "assumed_pods")
_TRIES: Final = 3
"""Looks at a calm cluster; on a busy machine the leader may change meanwhile."""


@dataclass
class Replica:
    """One scheduler program, which is started again when it was killed."""

    server: ApiServer
    folder: Path
    name: str
    port: int = 0
    process: psutil.Popen | None = None
    started: float = 0.0

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def start(self) -> None:
        kubeconfig, file = (self.folder / f"{self.name}.{part}" for part in ("kubeconfig", "json"))
        kubeconfig.write_text(self.server.kubeconfig(_USER))
        tree = configuration(NAMESPACE)
        tree["clientConnection"] = {"kubeconfig": str(kubeconfig), "qps": 1000, "burst": 1000}
        file.write_text(json.dumps(tree))
        (self.port,) = free_ports(1)
        command = [
            *(sys.executable, "-m", "cluster.scheduler.main", f"--config={file}"),
            *("--address=127.0.0.1", f"--port={self.port}", "--secure-port=0"),
        ]
        with self.log.open("ab") as output:
            self.process = psutil.Popen(command, stdout=output, stderr=output)
        self.started = time.monotonic()

    def end(self, how: signal.Signals) -> int:
        """End the program and return its exit status."""
        process, self.process = self.process, None
        if process is None:
            return 0
        process.send_signal(how)
        try:
            return int(process.wait(30) or 0)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait()
            return -1


@dataclass
class Figures:
    """memory: MiB of the leading program by its start, with the seconds since then."""

    wrong: list[str] = field(default_factory=list)
    calms: list[Plain] = field(default_factory=list)
    memory: dict[float, list[tuple[float, float]]] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)


def per_minute(samples: Sequence[tuple[float, float]]) -> list[int]:
    """Return the last of the (seconds, MiB) of each minute, in MiB.

    A minute without a sample, in which another program led, is left out.
    """
    of_minute = {int(seconds // 60): used for seconds, used in samples}
    return [round(of_minute[minute]) for minute in sorted(of_minute)]


def growth_mb_per_hour(samples: Sequence[tuple[float, float]]) -> float | None:
    """Return the slope of the second half of (seconds, MiB); None for less than two minutes."""
    half = samples[len(samples) // 2 :]
    if len(half) < 3 or half[-1][0] - half[0][0] < 60:
        return None
    seconds, used = zip(*half, strict=True)
    return round(statistics.linear_regression(seconds, used).slope * 3600, 1)


_VARIABLE: Final = re.compile(r"[A-Za-z_]*-?\d[\w.:/-]*|'[^']*'")


def log_kinds(lines: Iterable[str]) -> Counter[tuple[str, str]]:
    """Count the lines of a log by level and message, with names and numbers left out."""
    counts: Counter[tuple[str, str]] = Counter()
    for line in lines:
        try:
            entry = json.loads(line)
            level, message = entry["level"], entry["message"]
        except (ValueError, KeyError, TypeError):
            counts["not JSON", line[:100]] += 1
            continue
        if "traceback" in entry:
            level = "traceback"
        counts[level, _VARIABLE.sub("*", message)[:160]] += 1
    return counts


def differences(seen: Seen, pods_of: dict[str, list[str]], pending: int) -> list[str]:
    """Compare the leader's tables with the API server.

    pods_of: node -> keys of its pods in the tables. pending: pods and Reservations in its queue.
    """
    expected: dict[str, list[str]] = {each["metadata"]["name"]: [] for each in seen.nodes}
    for node, pod in bound(seen):
        expected.setdefault(node, []).append(key_of(pod))
    for each in seen.reservations:
        status = each.get("status", {})
        if status.get("phase") == "Available":
            # As the tables name a reserve pod.
            key = f"default/{each['metadata']['uid']}"
            expected.setdefault(status["nodeName"], []).append(key)
    lacking = sorted({each["metadata"]["name"] for each in seen.nodes} - pods_of.keys())
    found = [f"nodes {lacking} are not in the tables"] if lacking else []
    for node in sorted(expected.keys() | pods_of.keys()):
        here, there = Counter(pods_of.get(node, [])), Counter(expected.get(node, []))
        if here != there:
            more, less = sorted((here - there).elements()), sorted((there - here).elements())
            found.append(f"tables of {node}: {more} only there, {less} only at the API server")
    waits = sum(1 for _ in waiting(seen)) + sum(
        each.get("status", {}).get("phase") in (None, "", "Pending") for each in seen.reservations
    )
    if waits != pending:
        found.append(f"{pending} pods are in the queue, {waits} wait at the API server")
    return found


class Soak:
    """The schedulers, what is done to them, and what is looked at."""

    def __init__(self, server: ApiServer, life: Life, replicas: Sequence[Replica]) -> None:
        self._server = server
        self._life = life
        self._replicas = replicas
        self._one_thing = asyncio.Lock()
        """Nothing is killed while the life is calm."""
        self.figures = Figures()

    def _wrong(self, text: str) -> None:
        self.figures.wrong.append(text)
        print(f"WRONG: {text}", file=sys.stderr, flush=True)

    # --- the leader ----------------------------------------------------------------------------

    async def _page(self, replica: Replica, path: str) -> bytes | None:
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://127.0.0.1:{replica.port}{path}") as answer,
            ):
                return await answer.read() if answer.status == 200 else None
        except aiohttp.ClientError:
            return None

    async def _leader(self) -> Replica | None:
        for each in self._replicas:
            if await self._page(each, "/apis/v1/__services__") is not None:
                return each
        return None

    async def _metrics(self, replica: Replica) -> dict[str, float]:
        page = await self._page(replica, "/metrics") or b""
        rows = (line.rpartition(" ") for line in page.decode().splitlines() if line[:1] != "#")
        return {name: float(value) for name, _, value in rows}

    async def samples(self) -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(_SAMPLE_S)
            for each in self._replicas:
                if each.process is not None and each.process.poll() is not None:
                    self._ended(each, each.process.returncode)
            leader = await self._leader()
            if leader is None or leader.process is None:
                print(
                    f"{time.monotonic() - began:5.0f} s: no scheduler has the lease",
                    file=sys.stderr,
                )
                continue
            memory = leader.process.memory_info().rss / 2**20
            age = time.monotonic() - leader.started
            self.figures.memory.setdefault(leader.started, []).append((age, memory))
            metrics = await self._metrics(leader)
            places = {
                place: metrics.get(f'scheduler_pending_pods{{queue="{place}"}}', -1)
                for place in (*_PLACES, "unschedulable", "gated")
            }
            print(
                f"{time.monotonic() - began:5.0f} s: {leader.name} {memory:.0f} MiB,"
                f" {self._life.created} created, {self._life.bound} bound, {places}",
                file=sys.stderr,
                flush=True,
            )

    def _ended(self, replica: Replica, status: int) -> None:
        """Start a program again that ended; it may, where the API server was away for too long."""
        *_, last = ("", *replica.log.read_text(errors="replace").splitlines())
        if status == 1 and _NOT_RENEWED in last:
            self.figures.done["lease not renewed"] += 1
        else:
            self._wrong(f"{replica.name} ended by itself with status {status}: {last}")
        replica.start()

    # --- crashes -------------------------------------------------------------------------------

    async def crashes(self, every: float) -> None:
        """Kill or stop one part after the other."""
        works: tuple[Callable[[], Any], ...] = (
            partial(self._restart_leader, signal.SIGKILL),
            partial(self._restart_server, signal.SIGKILL),
            partial(self._restart_leader, signal.SIGTERM),
            self._compact,
            partial(self._restart_server, signal.SIGTERM),
        )
        number = 0
        while True:
            await asyncio.sleep(every)
            async with self._one_thing:
                await works[number % len(works)]()
            number += 1

    async def _restart_leader(self, how: signal.Signals) -> None:
        leader = await self._leader()
        if leader is None:
            return
        self.figures.done[f"leader {how.name}"] += 1
        status = await asyncio.to_thread(leader.end, how)
        if how is signal.SIGTERM and status != 0:
            self._wrong(f"{leader.name} ended with status {status} after SIGTERM")
        leader.start()

    async def _restart_server(self, how: signal.Signals) -> None:
        self.figures.done[f"API server {how.name}"] += 1

        def restart() -> None:
            self._server.stop("kube-apiserver", how=how)
            self._server.start_apiserver()

        await asyncio.to_thread(restart)

    async def _compact(self) -> None:
        self.figures.done["etcd compacted"] += 1
        await asyncio.to_thread(self._server.compact_etcd)

    # --- calm ----------------------------------------------------------------------------------

    async def calm(self) -> None:
        """Stop the life, wait until nothing is tried any more, and look at everything."""
        async with self._one_thing:
            await self._look()
        self._life.go_on()

    async def _look(self) -> None:
        began = time.monotonic()
        await self._life.calm_down()
        for _ in range(_TRIES):
            leader = await self._until_still()
            seen = await self._life.seen()
            took = time.monotonic() - began
            metrics = {} if leader is None else await self._metrics(leader)
            pods_of = {} if leader is None else await self._pods_of(leader, seen)
            if leader is not None and await self._leader() is leader:
                break
        else:
            self._wrong("it is not still after the longest calm")
            return
        stuck = Room(seen).stuck()
        for text in stuck:
            pod = text.partition(" ")[0]
            why = await self._page(leader, f"/apis/v1/pods/{pod}") or b""
            self._wrong(f"{text}: {why.decode()}")
        pending = sum(
            amount for name, amount in metrics.items() if name.startswith("scheduler_pending_pods")
        )
        gated = metrics.get('scheduler_pending_pods{queue="gated"}', 0)
        scheduling_gates = sum(
            bool(pod["spec"].get("schedulingGates"))
            and not pod["metadata"].get("deletionTimestamp")
            for pod in seen.pods
        )
        for text in (
            *violations(seen),
            *differences(seen, pods_of, int(pending) - scheduling_gates),
        ):
            self._wrong(text)
        faults = {
            name: amount
            for name, amount in metrics.items()
            if name.startswith("koord_scheduler_faults") and amount
        }
        if faults:
            self._wrong(f"faults: {faults}")
        waits = sum(1 for _ in waiting(seen))
        figures = {
            "still_after_s": round(took, 1),
            "nodes": len(seen.nodes),
            "bound": sum(1 for _ in bound(seen)),
            "waiting": waits,
            "gated": int(gated),
            "gangs": len(seen.complete),
        }
        self.figures.calms.append(figures)
        print(f"calm: {figures}", file=sys.stderr, flush=True)

    async def _pods_of(self, leader: Replica, seen: Seen) -> dict[str, list[str]]:
        """Return the keys of the pods on each node in the leader's tables."""
        found = {}
        for node in seen.nodes:
            name = node["metadata"]["name"]
            page = await self._page(leader, f"/apis/v1/nodes/{name}")
            if page is not None:
                found[name] = [_key(pod) for pod in json.loads(page)["pods"]]
        return found

    async def _until_still(self) -> Replica | None:
        """Return the leader once nothing has been tried or bound for a while, None if never."""
        end = time.monotonic() + _LONGEST_CALM_S
        last: object = None
        since = time.monotonic()
        while time.monotonic() < end:
            await asyncio.sleep(1.0)
            leader = await self._leader()
            metrics = {} if leader is None else await self._metrics(leader)
            tried = [metrics.get(f'scheduler_pending_pods{{queue="{p}"}}', -1) for p in _PLACES]
            sizes = [metrics.get(f'scheduler_cache_size{{type="{k}"}}', 0) for k in _SIZES]
            state = (leader and leader.name, *sizes, self._life.bound, len(self._life.pods.items))
            # A new leader has no nodes until it has read the cluster.
            if any(tried) or sizes[-1] or not sizes[0] or state != last:
                last, since = state, time.monotonic()
            elif time.monotonic() - since >= _STILL_S:
                return leader
        return None

    # --- all -----------------------------------------------------------------------------------

    async def run(self, *, seconds: float, every: float, rate: float) -> None:
        background: list[asyncio.Task[None]] = []
        try:
            for each in self._replicas:
                each.start()
            await self._life.fill()
            print("filled", file=sys.stderr, flush=True)
            for work in (self._life.churn(rate), self._life.edits(), self.samples()):
                background.append(asyncio.create_task(work))
            crashing = asyncio.create_task(self.crashes(every=min(60.0, seconds / 12)))
            background.append(crashing)
            self._life.go_on()
            began = time.monotonic()
            while (left := began + seconds - time.monotonic()) > 0:
                if left < seconds / 2:
                    crashing.cancel()
                await asyncio.sleep(min(every, left))
                for task in background:
                    if task.done() and not task.cancelled():
                        task.result()
                await self.calm()
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            for each in self._replicas:
                status = await asyncio.to_thread(each.end, signal.SIGTERM)
                if status != 0 and _NOT_RENEWED not in each.log.read_text(errors="replace")[-500:]:
                    self._wrong(f"{each.name} ended with status {status} at the end")

    def report(self) -> Plain:
        """Return the figures, after a look at the logs."""
        for text in self._life.failures:
            self._wrong(f"this program: {text}")
        kinds: Counter[tuple[str, str]] = Counter()
        for each in self._replicas:
            kinds += log_kinds(each.log.read_text(errors="replace").splitlines())
        for (level, message), count in kinds.items():
            bad = level in ("error", "critical", "traceback", "not JSON")
            if bad and _NOT_RENEWED not in message:
                self._wrong(f"log, {count} times: {level}: {message}")
        longest = max(self.figures.memory.values(), key=len, default=[])
        return {
            "created": self._life.created,
            "bound": self._life.bound,
            "done": self.figures.done,
            "calms": self.figures.calms,
            "memory_mb_per_minute": per_minute(longest),
            "growth_mb_per_hour": growth_mb_per_hour(longest),
            "log": [[*kind, count] for kind, count in kinds.most_common(25)],
            "wrong": len(self.figures.wrong),
        }


def _key(pod: Plain) -> str:
    return f"{pod['namespace']}/{pod['name']}" if pod["namespace"] else str(pod["name"])


async def _soak(server: ApiServer, folder: Path, given: argparse.Namespace) -> Soak:
    replicas = [Replica(server, folder, name) for name in ("first", "second")]
    async with KeptClient(server.connection(), connections=16) as client:
        await grant(client, _USER, *rbac())
        life = Life(
            client,
            nodes=given.nodes,
            pods=given.pods,
            scheduler="koord-scheduler",
            seed=given.seed,
        )
        following = asyncio.create_task(life.pods.run())
        volumes = asyncio.create_task(life.volume_controller())
        await life.begin()
        print("cluster made", file=sys.stderr, flush=True)
        soak = Soak(server, life, replicas)
        try:
            await soak.run(seconds=given.minutes * 60, every=given.every, rate=given.rate)
        finally:
            for task in (following, volumes):
                task.cancel()
            await asyncio.gather(following, volumes, return_exceptions=True)
        return soak


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--pods", type=int, default=3000)
    parser.add_argument("--rate", type=float, default=20, help="pods that come or go a second")
    parser.add_argument("--every", type=float, default=150, help="seconds between calm moments")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", help="folder for the logs of the schedulers, to keep them")
    given = parser.parse_args()
    with ExitStack() as stack:
        server = stack.enter_context(api_server())
        folder = Path(given.logs or stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(exist_ok=True)
        uvloop.run(install(server))
        report = uvloop.run(_soak(server, folder, given)).report()
    print(json.dumps(report))
    if report["wrong"]:
        raise SystemExit(1)


if __name__ == "__main__":
    run_main(main)

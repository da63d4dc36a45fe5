"""What the runtime proxy adds to a CRI call: direct, through it, and through a naive byte proxy.

    python -m benchmarks.proxy_latency [--generation 2.1] [--calls 2000] [--naive]

One real containerd (tests/beds, needs root); the ways are measured call by call in turns, so that
a busy machine hurts all of them alike. Prints p50 and p99 per call, calls per second with eight
callers, and the proxy's resident memory. `--naive` adds the same calls through a byte proxy on
grpc.aio, the obvious way to write one in Python.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

from benchmarks.running import run_main
from protos.cri.v1 import api_pb2 as cri
from tests.beds.containerd import GENERATIONS, Containerd, Generation, containerd
from tests.beds.cri import Cri
from tests.beds.kubelet import container_config, sandbox_config
from tests.runtime_proxy.fake_cri import connected
from tests.runtime_proxy.processes import ROOT, STAGES, hook_process, proxy
from tests.waiting import wait_until

_CONTAINERS = 400
_ROUNDS = 5
_CALLERS = 8

NAIVE_PROXY = """
import asyncio, sys
import grpc

class Anything(grpc.GenericRpcHandler):
    def __init__(self, channel):
        self.channel = channel
    def service(self, details):
        async def handle(request, context):
            call = self.channel.unary_unary(details.method)
            return await call(request, timeout=context.time_remaining())
        return grpc.unary_unary_rpc_method_handler(handle)

async def main(backend, listen):
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    channel = grpc.aio.insecure_channel("unix://" + backend, options=options)
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers((Anything(channel),))
    server.add_insecure_port("unix://" + listen)
    await server.start()
    print("up", flush=True)
    await server.wait_for_termination()

asyncio.run(main(*sys.argv[1:]))
"""

Call = Callable[[Cri], object]


@contextmanager
def naive_proxy(backend: Path, folder: Path) -> Iterator[Path]:
    listen = folder / "naive.sock"
    process = subprocess.Popen(
        [sys.executable, "-c", NAIVE_PROXY, str(backend), str(listen)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != b"up\n":
            raise RuntimeError("the naive proxy did not start")
        yield listen
    finally:
        process.kill()
        process.wait()


def taken_us(call: Call, through: Cri) -> float:
    began = time.perf_counter()
    call(through)
    return (time.perf_counter() - began) * 1e6


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def compare(name: str, call: Call, ways: dict[str, Cri], calls: int) -> None:
    """Call each way in turn and print one line per way, the first one being the reference."""
    for through in ways.values():
        for _ in range(min(50, calls)):
            call(through)
    taken: dict[str, list[float]] = {way: [] for way in ways}
    turn = list(ways.items())
    for _ in range(calls):
        for way, through in turn:
            taken[way].append(taken_us(call, through))
        # Another order each time: no way always runs after the same other one.
        random.shuffle(turn)
    reference = percentile(taken[next(iter(ways))], 0.5)
    for way, values in taken.items():
        middle = percentile(values, 0.5)
        print(
            f"{name:<28} {way:<14} p50 {middle:7.0f} us   p99 {percentile(values, 0.99):7.0f} us"
            f"   added at p50 {middle - reference:6.0f} us"
        )


def calls_per_second(call: Call, path: Path, calls: int) -> float:
    with ExitStack() as stack:
        clients = [Cri(stack.enter_context(connected(path))) for _ in range(_CALLERS)]
        for client in clients:
            call(client)

        def work(client: Cri) -> None:
            for _ in range(calls // _CALLERS):
                call(client)

        began = time.perf_counter()
        with futures.ThreadPoolExecutor(_CALLERS) as pool:
            list(pool.map(work, clients))
        return calls / (time.perf_counter() - began)


def throughput(call: Call, ways: dict[str, Path], calls: int) -> None:
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(_ROUNDS):
        for way, path in ways.items():
            rates[way].append(calls_per_second(call, path, calls))
    for way, found in rates.items():
        print(f"{'Version, 8 callers':<28} {way:<14} {percentile(found, 0.5):7.0f} calls/s")


def creation(sandbox_id: str, sandbox: cri.PodSandboxConfig) -> Call:
    manifest: dict[str, Any] = {"metadata": {"name": "bench", "uid": "bench"}}
    container = {"name": "main", "env": [{"name": f"E{n}", "value": "v"} for n in range(20)]}
    config = container_config(manifest, container, "besteffort")
    attempts = iter(range(10**9))

    def create(through: Cri) -> None:
        config.metadata.attempt = next(attempts)
        through.create_container(sandbox_id, config, sandbox)

    return create


def fill(runtime: Containerd, sandbox_id: str, sandbox: cri.PodSandboxConfig) -> None:
    create = creation(sandbox_id, sandbox)
    for _ in range(_CONTAINERS):
        create(runtime.cri)


def clear(runtime: Containerd) -> None:
    with futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(runtime.cri.remove_container, [c.id for c in runtime.cri.containers()]))


def run(generation: Generation, calls: int, *, with_naive: bool) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="koord-bench-")))
        runtime = stack.enter_context(containerd(generation))
        running = stack.enter_context(proxy(runtime.socket))
        running.wait_for_log("recovered")
        paths = {"direct": runtime.socket, "proxy": running.socket}
        if with_naive:
            paths["naive grpc.aio"] = stack.enter_context(naive_proxy(runtime.socket, folder))
        ways = {way: Cri(stack.enter_context(connected(path))) for way, path in paths.items()}
        print(f"containerd {generation}, Python {sys.version.split()[0]}, {calls} calls a way")
        compare("Version", lambda through: through.version(), ways, calls)
        throughput(lambda through: through.version(), paths, calls)
        parent = runtime.groups.make_pod("bench", "besteffort", cpu_shares=2)
        manifest: dict[str, Any] = {"metadata": {"name": "bench", "uid": "bench"}}
        sandbox = sandbox_config(manifest, parent, runtime.logs)
        sandbox_id = runtime.cri.run_sandbox(sandbox)
        fill(runtime, sandbox_id, sandbox)
        compare(
            f"ListContainers ({_CONTAINERS})",
            lambda through: through.containers(),
            ways,
            calls // 2,
        )
        clear(runtime)
        create = creation(sandbox_id, sandbox)
        compare("CreateContainer, no hooks", create, ways, calls // 10)
        clear(runtime)
        service = stack.enter_context(hook_process(running.folder / "hook.sock"))
        running.register(service.socket, STAGES)
        wait_until(lambda: "registered" in running.log_text(), "the hook server")
        compare("CreateContainer, with hooks", create, ways, calls // 10)
        clear(runtime)
        print(f"resident memory of the proxy: {running.resident_kib() / 1024:.1f} MiB")
        runtime.remove_pods()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generation", choices=GENERATIONS, default=GENERATIONS[-1])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--naive", action="store_true")
    chosen = parser.parse_args()
    run(cast(Generation, chosen.generation), chosen.calls, with_naive=chosen.naive)


if __name__ == "__main__":
    run_main(main)

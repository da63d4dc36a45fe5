"""Real containerd with the proxy before it, and a kubelet's calls through the proxy."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from tests.beds.containerd import Containerd
from tests.beds.cri import Cri
from tests.beds.kubelet import running_pod
from tests.runtime_proxy.fake_cri import connected
from tests.runtime_proxy.processes import Proxy, proxy


@dataclass
class Node:
    """containerd, the proxy before it, and a bed whose CRI calls go through the proxy."""

    runtime: Containerd
    proxy: Proxy
    kubelet: Containerd

    @property
    def cri(self) -> Cri:
        return self.kubelet.cri


@contextmanager
def node(runtime: Containerd, *flags: str) -> Iterator[Node]:
    with ExitStack() as stack:
        running = stack.enter_context(proxy(runtime.socket, flags=flags))
        running.wait_for_log("recovered")
        channel = stack.enter_context(connected(running.socket))
        through = copy.copy(runtime)
        through._client = Cri(channel)
        yield Node(runtime, running, through)


def with_creations(
    here: Node, pod: Callable[[], Mapping[str, Any]], trouble: Callable[[], None], callers: int = 3
) -> tuple[list[int], list[str]]:
    """Callers make one pod after the other during the trouble: how many each made, what failed."""
    stop = threading.Event()

    def make() -> tuple[int, list[str]]:
        made, failed = 0, []
        while not stop.is_set():
            try:
                with running_pod(here.kubelet, pod()):
                    made += 1
            except grpc.RpcError as error:
                failed.append(f"{error.code()}: {error.details()}")
        return made, failed

    with futures.ThreadPoolExecutor(callers) as pool:
        running = [pool.submit(make) for _ in range(callers)]
        try:
            trouble()
        finally:
            stop.set()
        results = [future.result() for future in running]
    return [made for made, _ in results], [text for _, texts in results for text in texts]


def succeeds(action: Callable[[], object]) -> bool:
    """Tell whether a call is answered."""
    try:
        action()
    except grpc.RpcError:
        return False
    return True

"""Network namespaces of a test's own, each with a thread that lives in it.

A namespace ends with its thread: nothing is left behind, also when the process is killed. Programs
that the thread starts, such as ip and tc, run in the namespace as well.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from shutil import which
from typing import Final, ParamSpec, TypeVar

from tests.conftest import require

_NEW_NETWORK: Final = 0x40000000  # CLONE_NEWNET

_P = ParamSpec("_P")
_T = TypeVar("_T")


@cache
def missing() -> str:
    """Return what keeps this machine from shaping traffic in namespaces; "" if nothing does."""
    if os.geteuid() != 0:
        return "needs root: run the tests with sudo"
    if which("ip") is None or which("tc") is None:
        return "needs ip and tc: install iproute2"
    try:
        with namespace() as probe:
            probe.ip("link add name probe type veth peer name eborp")
            probe.tc("qdisc add dev probe root handle 1: htb")
    except (OSError, subprocess.CalledProcessError) as error:
        return f"needs network namespaces, veth and sch_htb: {error}"
    return ""


def require_shaping() -> None:
    """Go on only on a kernel that shapes traffic in namespaces of its own."""
    problem = missing()
    require(not problem, problem)


class Namespace:
    """A namespace and its thread. Its loopback is up."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        try:
            self.task = self._thread.submit(_enter).result()
            self.ip("link set dev lo up")
        except BaseException:
            self.close()
            raise

    def run(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Return the result of a call in this namespace."""
        return self.start(work, *args, **kwargs).result(timeout=60)

    def start(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Start a call in this namespace, behind those before."""
        return self._thread.submit(work, *args, **kwargs)

    def ip(self, command: str) -> str:
        return self.run(_call, "ip", command)

    def tc(self, command: str) -> str:
        return self.run(_call, "tc", command)

    def index(self, device: str) -> int:
        """Return the number of a device."""
        return int(self.ip(f"-o link show dev {device}").split(":")[0])

    def sysctl(self, name: str, value: str) -> None:
        """Set a sysctl below net."""
        self.run(Path(f"/proc/sys/net/{name}").write_text, value)

    def close(self) -> None:
        self._thread.shutdown()


@contextmanager
def namespace() -> Iterator[Namespace]:
    made = Namespace()
    try:
        yield made
    finally:
        made.close()


@contextmanager
def device() -> Iterator[tuple[Namespace, int]]:
    """A namespace with a device eth0 that is up; and the device's number."""
    with namespace() as node:
        node.ip("link add name eth0 type veth peer name far")
        node.ip("link set dev eth0 up")
        node.ip("link set dev far up")
        yield node, node.index("eth0")


class Routed:
    """A node between two pods and the world, each a namespace. The node's device to it is eth0."""

    POD = ("10.9.1.2", "fd09:1::2")
    OTHER = ("10.9.2.2", "fd09:2::2")
    WORLD = ("10.9.9.2", "fd09:9::2")

    def __init__(self, stack: ExitStack) -> None:
        self.node = stack.enter_context(namespace())
        self.pod, self.other, self.world = (stack.enter_context(namespace()) for _ in range(3))
        for name, peer, number in (
            ("pod0", self.pod, 1),
            ("pod1", self.other, 2),
            ("eth0", self.world, 9),
        ):
            self.node.ip(f"link add name {name} type veth peer name eth0 netns {peer.task}")
            for side, device_name, last in ((self.node, name, 1), (peer, "eth0", 2)):
                side.ip(f"addr add 10.9.{number}.{last}/24 dev {device_name}")
                side.ip(f"addr add fd09:{number}::{last}/64 dev {device_name} nodad")
                side.ip(f"link set dev {device_name} up")
            peer.ip(f"route add default via 10.9.{number}.1")
            peer.ip(f"-6 route add default via fd09:{number}::1")
        self.node.sysctl("ipv4/ip_forward", "1")
        self.node.sysctl("ipv6/conf/all/forwarding", "1")


@contextmanager
def routed() -> Iterator[Routed]:
    with ExitStack() as stack:
        yield Routed(stack)


def _enter() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NETWORK) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return threading.get_native_id()


def _call(program: str, command: str) -> str:
    done = subprocess.run(
        [program, *command.split()], check=True, text=True, capture_output=True, timeout=30
    )
    return done.stdout

"""Takes listening sockets over from systemd or a predecessor, and hands them to a successor.

systemd passes them as sd_listen_fds(3) describes. A process that is asked to reload starts its
successor with its own sockets in the same way, by names in an environment variable of ours, because
LISTEN_PID cannot be known before the successor runs.
"""

import errno
import logging
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

log = logging.getLogger(__name__)

_FIRST_PASSED = 3
_HANDED_OVER = "KOORD_RUNTIME_PROXY_SOCKETS"
CRI_SOCKET = "cri"
HTTP_SOCKET = "http"
_READY_PIPE = "ready"


def passed_sockets(environment: Mapping[str, str], pid: int) -> dict[str, int]:
    """Return the descriptors that this process was started with, by name.

    A socket unit's one socket is the CRI socket whatever its name.
    """
    handed = environment.get(_HANDED_OVER, "")
    if handed:
        pairs = [part.partition("=") for part in handed.split(":")]
        return {name: int(number) for name, _, number in pairs if number.isdigit()}
    count = environment.get("LISTEN_FDS", "")
    if environment.get("LISTEN_PID") != str(pid) or not count.isdigit() or int(count) < 1:
        return {}
    if int(count) > 1:
        log.warning("only the first passed socket is used", extra={"passed": count})
    return {CRI_SOCKET: _FIRST_PASSED}


@dataclass(frozen=True, slots=True)
class Passed:
    """What this process was started with: listening sockets, and a pipe to a predecessor."""

    sockets: Mapping[str, socket.socket]
    predecessor: int | None = None

    def tell_predecessor(self) -> None:
        """Let a predecessor end: this process serves the sockets from now on."""
        if self.predecessor is not None:
            with suppress(OSError):
                os.write(self.predecessor, b"ready")
            os.close(self.predecessor)


def take_passed() -> Passed:
    """Take the passed descriptors. They are closed on exec, and unset in the environment."""
    found = passed_sockets(os.environ, os.getpid())
    for variable in (_HANDED_OVER, "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"):
        os.environ.pop(variable, None)
    predecessor = found.pop(_READY_PIPE, None)
    if predecessor is not None:
        os.set_inheritable(predecessor, False)
    sockets = {}
    for name, descriptor in found.items():
        sockets[name] = socket.socket(fileno=descriptor)
        sockets[name].set_inheritable(False)
        sockets[name].setblocking(False)
    return Passed(sockets, predecessor)


@dataclass(frozen=True, slots=True)
class Successor:
    """A process that was started to take over; `ready` is readable when it serves or has failed."""

    pid: int
    ready: int


def start_successor(command: Sequence[str], sockets: Mapping[str, socket.socket]) -> Successor:
    """Start `command` with our listening sockets. Raises OSError.

    `ready` becomes readable with octets once the successor serves, and with none if it ended.

    The successor becomes a child of init. At the notification of a new main process, systemd asks
    once whether this is a child of its own. Otherwise it never learns of the end of the process,
    and at a stop it kills the process without waiting for what SIGTERM begins.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    hearing, telling = os.pipe2(os.O_CLOEXEC)
    try:
        passed = {name: sock.fileno() for name, sock in sockets.items()}
        passed[_READY_PIPE] = writing
        environment = {
            **os.environ,
            _HANDED_OVER: ":".join(f"{name}={number}" for name, number in passed.items()),
        }
        # It names this process; the successor becomes the main one, and the watchdog is for it.
        environment.pop("WATCHDOG_PID", None)
        parent = os.fork()
        if parent == 0:
            _leave_an_orphan(command, environment, list(passed.values()), telling)
        os.close(telling)
        telling = -1
        os.waitpid(parent, 0)
        said = int(os.read(hearing, 32) or -errno.EIO)
    except OSError:
        os.close(reading)
        raise
    finally:
        for descriptor in (writing, hearing, telling):
            if descriptor >= 0:
                os.close(descriptor)
    if said < 0:
        os.close(reading)
        raise OSError(-said, os.strerror(-said), command[0])
    return Successor(said, reading)


def _leave_an_orphan(
    command: Sequence[str], environment: Mapping[str, str], passed: Sequence[int], telling: int
) -> NoReturn:
    """In a fork: start the command, write its process id or negative errno, and end at once."""
    said = -errno.EIO
    try:
        for descriptor in passed:
            os.set_inheritable(descriptor, True)
        said = os.posix_spawn(
            command[0],
            list(command),
            environment,
            file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
            # Python ignores these, and what is ignored stays so across an exec.
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
        )
    except OSError as error:
        said = -(error.errno or errno.EIO)
    finally:
        os.write(telling, str(said).encode())
        os._exit(0)

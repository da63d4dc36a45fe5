"""The command line: upstream's flags with upstream's defaults, and ours (docs/runtime-proxy.md).

Facts: runtime-proxy.md 1.1. Flags that upstream once had are accepted and explained, so that a unit
file written for an old release starts.
"""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn, cast

from apis.meta import parse_duration
from service.addresses import parse_address
from service.unix import LONGEST_PATH

LISTEN = "/var/run/koord-runtimeproxy/runtimeproxy.sock"
BACKEND_MODES = ("Containerd", "Docker")

log = logging.getLogger(__name__)

_VANISHED = {
    "--remote-image-service-endpoint": (
        "images travel over the same connection as everything else: remove the flag"
    ),
}


@dataclass(frozen=True, slots=True)
class Options:
    listen: str
    backend: str
    mode: Literal["Containerd", "Docker"]
    skip_key: str
    skip_value: str
    hook_server_dir: str
    hook_timeout_s: float
    max_message_bytes: int
    state_dir: str
    drain_timeout_s: float
    http_address: tuple[str, int] | None
    log_level: str
    log_format: Literal["text", "json"]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\nRun {self.prog} --help for the flags.\n")


def socket_path(value: str) -> str:
    """An absolute path; a unix:// URL is what kubelet writes, so it is taken for one."""
    path = value.removeprefix("unix://")
    if not path.startswith("/"):
        raise argparse.ArgumentTypeError(f"{value!r} is not the absolute path of a unix socket")
    if len(path.encode()) > LONGEST_PATH:
        raise argparse.ArgumentTypeError(
            f"{value!r} is longer than the {LONGEST_PATH} octets a socket may have"
        )
    return path


def duration_s(value: str) -> float:
    """Seconds of "500ms", "2s", "1m30s"."""
    try:
        nanoseconds = parse_duration(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{value!r} is {error}") from None
    if nanoseconds < 0:
        raise argparse.ArgumentTypeError(f"{value!r} is less than nothing")
    return nanoseconds / 1e9


def positive_duration_s(value: str) -> float:
    seconds = duration_s(value)
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"{value!r} leaves no time at all")
    return seconds


def message_bytes(value: str) -> int:
    if not value.isdigit() or not 65_536 <= int(value) <= 2**31 - 1:
        raise argparse.ArgumentTypeError(f"{value!r} is not between 65536 and 2147483647 octets")
    return int(value)


def address(value: str) -> tuple[str, int] | None:
    """HOST:PORT, or nothing at all to serve no HTTP."""
    if not value:
        return None
    try:
        host, port = parse_address(value, least_port=0)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{value!r}: {error}") from None
    return host or "127.0.0.1", port


def parse(arguments: Sequence[str]) -> Options:
    """Exits with status 2 and a sentence on a flag that it does not take."""
    parser = _Parser(
        prog="koord-runtime-proxy",
        description="Stands between kubelet and the container runtime and lets hooks take part.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--koord-runtimeproxy-endpoint",
        dest="listen",
        type=socket_path,
        default=LISTEN,
        help="unix socket that kubelet connects to (default %(default)s)",
    )
    parser.add_argument(
        "--remote-runtime-service-endpoint",
        dest="backend",
        type=socket_path,
        default="/var/run/containerd/containerd.sock",
        help="unix socket of the runtime, or of dockerd in Docker mode (default %(default)s)",
    )
    parser.add_argument(
        "--backend-runtime-mode",
        dest="mode",
        choices=BACKEND_MODES,
        default="Containerd",
        help="Containerd for any CRI runtime, Docker for dockerd (default %(default)s)",
    )
    parser.add_argument(
        "--runtime-hook-server-key",
        dest="skip_key",
        default="runtimeproxy.koordinator.sh/skip-hookserver",
        help="pod label that keeps hooks away from a pod (default %(default)s)",
    )
    parser.add_argument(
        "--runtime-hook-server-val",
        dest="skip_value",
        default="true",
        help="value that this label must have (default %(default)s)",
    )
    parser.add_argument(
        "--hook-server-dir",
        default="/etc/runtime/hookserver.d",
        help="folder of the hook servers' registration files (default %(default)s)",
    )
    parser.add_argument(
        "--hook-timeout",
        dest="hook_timeout_s",
        type=positive_duration_s,
        default="2s",
        help="how long one hook server may take for one call (default %(default)s)",
    )
    parser.add_argument(
        "--max-message-bytes",
        type=message_bytes,
        default=str(16 * 1024 * 1024),
        help="largest request that is held for hooks; set it to the runtime's own limit "
        "(default %(default)s)",
    )
    parser.add_argument(
        "--state-dir",
        default="/var/lib/koord-runtime-proxy",
        help="folder of the journal; empty keeps nothing on disk (default %(default)s)",
    )
    parser.add_argument(
        "--drain-timeout",
        dest="drain_timeout_s",
        type=duration_s,
        default="20s",
        help="how long running calls may go on after SIGTERM (default %(default)s)",
    )
    parser.add_argument(
        "--http-address",
        type=address,
        default="127.0.0.1:9318",
        help="HOST:PORT of /metrics, /healthz, /readyz and /status; empty serves none (default %(default)s)",
    )
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="(default %(default)s)",
    )
    parser.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="(default %(default)s)"
    )
    for flag in _VANISHED:
        parser.add_argument(flag, dest=flag, help=argparse.SUPPRESS)
    found = parser.parse_args(arguments)
    for flag, hint in _VANISHED.items():
        if getattr(found, flag) is not None:
            log.warning("flag has no effect any more", extra={"flag": flag, "hint": hint})
    return Options(
        listen=found.listen,
        backend=found.backend,
        mode=cast(Literal["Containerd", "Docker"], found.mode),
        skip_key=found.skip_key,
        skip_value=found.skip_value,
        hook_server_dir=found.hook_server_dir,
        hook_timeout_s=found.hook_timeout_s,
        max_message_bytes=found.max_message_bytes,
        state_dir=found.state_dir,
        drain_timeout_s=found.drain_timeout_s,
        http_address=found.http_address,
        log_level=found.log_level,
        log_format=cast(Literal["text", "json"], found.log_format),
    )

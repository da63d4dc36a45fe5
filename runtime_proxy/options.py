"""The command line: upstream's flags with upstream's defaults, and ours (docs/runtime-proxy.md).

A flag that upstream had once is accepted with a warning, so that a unit file of an old release
starts.
"""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, NoReturn

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
    """The flags' values under the names of the process. Durations are in seconds.

    listen, backend: paths of Unix sockets. http_address: None to serve no HTTP.
    """

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
    """Return an absolute path, also from a unix:// URL, which kubelet's flags take."""
    path = value.removeprefix("unix://")
    if not path.startswith("/"):
        raise argparse.ArgumentTypeError(f"{value!r} is not the absolute path of a unix socket")
    if len(path.encode()) > LONGEST_PATH:
        raise argparse.ArgumentTypeError(
            f"{value!r} is longer than the {LONGEST_PATH} bytes of a unix socket's path"
        )
    return path


def duration_s(value: str) -> float:
    """Return the seconds of a duration such as "500ms", "2s" or "1m30s"."""
    try:
        nanoseconds = parse_duration(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{value!r} is {error}") from None
    if nanoseconds < 0:
        raise argparse.ArgumentTypeError(f"{value!r} must not be negative")
    return nanoseconds / 1e9


def positive_duration_s(value: str) -> float:
    """Return the seconds of a duration above 0."""
    seconds = duration_s(value)
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"{value!r} must be greater than 0")
    return seconds


def message_bytes(value: str) -> int:
    """Return a size: at least a call of kubelet's with room, at most what gRPC can frame."""
    if not (value.isascii() and value.isdigit()) or not 65_536 <= int(value) <= 2**31 - 1:
        raise argparse.ArgumentTypeError(f"{value!r} is not between 65536 and 2147483647 bytes")
    return int(value)


def address(value: str) -> tuple[str, int] | None:
    """Return host and port of HOST:PORT; None for an empty text: no HTTP is served."""
    if not value:
        return None
    try:
        host, port = parse_address(value, least_port=0)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{value!r}: {error}") from None
    return host or "127.0.0.1", port


def _add_runtime_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("kubelet and the runtime")
    group.add_argument(
        "--koord-runtimeproxy-endpoint",
        dest="listen",
        type=socket_path,
        default=LISTEN,
        help="unix socket that kubelet connects to (default %(default)s)",
    )
    group.add_argument(
        "--remote-runtime-service-endpoint",
        dest="backend",
        type=socket_path,
        default="/var/run/containerd/containerd.sock",
        help="unix socket of the runtime, or of dockerd in Docker mode (default %(default)s)",
    )
    group.add_argument(
        "--backend-runtime-mode",
        dest="mode",
        choices=BACKEND_MODES,
        default="Containerd",
        help="Containerd for any CRI runtime, Docker for dockerd (default %(default)s)",
    )


def _add_hook_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("hooks")
    group.add_argument(
        "--runtime-hook-server-key",
        dest="skip_key",
        default="runtimeproxy.koordinator.sh/skip-hookserver",
        help="pod label that keeps hooks away from a pod (default %(default)s)",
    )
    group.add_argument(
        "--runtime-hook-server-val",
        dest="skip_value",
        default="true",
        help="value that this label must have (default %(default)s)",
    )
    group.add_argument(
        "--hook-server-dir",
        default="/etc/runtime/hookserver.d",
        help="folder of the hook servers' registration files (default %(default)s)",
    )
    group.add_argument(
        "--hook-timeout",
        dest="hook_timeout_s",
        type=positive_duration_s,
        default="2s",
        help="how long one hook server may take for one call (default %(default)s)",
    )
    group.add_argument(
        "--max-message-bytes",
        type=message_bytes,
        default=str(16 * 1024 * 1024),
        help="largest request that is held for hooks; set it to the runtime's own limit "
        "(default %(default)s)",
    )


def _add_process_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the process")
    group.add_argument(
        "--state-dir",
        default="/var/lib/koord-runtime-proxy",
        help="folder of the journal; empty keeps nothing on disk (default %(default)s)",
    )
    group.add_argument(
        "--drain-timeout",
        dest="drain_timeout_s",
        type=duration_s,
        default="20s",
        help="how long running calls may go on after SIGTERM (default %(default)s)",
    )
    group.add_argument(
        "--http-address",
        type=address,
        default="127.0.0.1:9318",
        help="HOST:PORT of /metrics, /healthz, /readyz and /status; empty serves none "
        "(default %(default)s)",
    )
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="(default %(default)s)",
    )
    group.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="(default %(default)s)"
    )


def parse(arguments: Sequence[str]) -> Options:
    """Return the options. Exits with status 2 and a sentence on a flag that is not accepted."""
    parser = _Parser(
        prog="koord-runtime-proxy",
        description="Stands between kubelet and the container runtime, and asks hook servers about "
        "the calls that make, change and end pods.",
        allow_abbrev=False,
    )
    _add_runtime_flags(parser)
    _add_hook_flags(parser)
    _add_process_flags(parser)
    for flag in _VANISHED:
        parser.add_argument(flag, dest=flag, help=argparse.SUPPRESS)
    found = parser.parse_args(arguments)
    for flag, hint in _VANISHED.items():
        if getattr(found, flag) is not None:
            log.warning("flag has no effect any more", extra={"flag": flag, "hint": hint})
    return Options(**{field.name: getattr(found, field.name) for field in fields(Options)})

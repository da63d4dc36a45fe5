"""What `koordctl doctor` finds, and what its checks look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from koordctl.client import Client
from koordctl.processes import Process
from koordlet.configuration.config import Config
from linux.host import Host


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. fix: what to do, "" when nothing needs to be done."""

    check: str
    state: Literal["ok", "info", "warn", "fail"]
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Patient:
    """The machine, and what the daemon on it is configured for."""

    config: Config
    host: Host
    client: Client
    processes: tuple[Process, ...]


Check = Callable[[Patient], Iterator[Finding]]

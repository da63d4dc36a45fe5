"""The findings of `koordctl doctor`, and the inputs of its checks."""

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
    """The result of one check. fix: what to do, "" when nothing needs to be done."""

    check: str
    state: Literal["ok", "info", "warn", "fail"]
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Patient:
    """The machine that is examined, its processes, and koordlet's configuration on it."""

    config: Config
    host: Host
    client: Client
    processes: tuple[Process, ...]


Check = Callable[[Patient], Iterator[Finding]]

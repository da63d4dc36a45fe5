"""Reloads the configuration: some fields take effect at once, the others need a restart."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from apis.errors import InputError, InputErrors
from koordlet.configuration.config import Config, Section
from koordlet.daemon.parts import Parts
from service.events import Severity

_LIVE: Final = frozenset(
    {"feature_gates", "compat", "disable_unset_cpu_quota", "hami_core_library", "log"}
)
"""Fields that take effect without a restart; all of `log` except the format."""


def merged(in_force: Config, read: Config) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration in force from now on, and the changed fields that need a restart.

    Fields are named as the file writes them: `http.address`.
    """
    live = {name: getattr(read, name) for name in _LIVE}
    live["log"] = msgspec.structs.replace(read.log, format=in_force.log.format)
    config = msgspec.structs.replace(in_force, **live)
    return config, tuple(sorted(_differences(config, read)))


def _differences(one: Section, other: Section, prefix: str = "") -> Iterator[str]:
    for field in msgspec.structs.fields(one):
        left, right = getattr(one, field.name), getattr(other, field.name)
        name = f"{prefix}{field.encode_name}"
        if isinstance(left, Section):
            yield from _differences(left, right, f"{name}.")
        elif left != right:
            yield name


def reload(parts: Parts, read: Callable[[], Config]) -> None:
    """Read configuration and objects again; a bad configuration changes nothing."""
    try:
        config, late = merged(parts.config, read())
    except (InputError, InputErrors) as error:
        parts.events.add(
            "bad-config",
            "configuration",
            f"{error}; the configuration in force stays",
            severity=Severity.ERROR,
        )
        return
    if late:
        parts.events.add(
            "restart-needed", "configuration", f"a restart is needed to change {', '.join(late)}"
        )
    parts.config = config
    logging.getLogger().setLevel(config.log.level.upper())
    parts.rules.change(settings=config.settings())
    parts.feeds.scan_soon()
    parts.events.add(
        "reloaded", "configuration", "configuration read again", severity=Severity.INFO
    )

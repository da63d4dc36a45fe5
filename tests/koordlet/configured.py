"""koordlet's configuration without a file."""

from __future__ import annotations

from typing import Any

from koordlet.configuration.config import Config, Mode
from koordlet.configuration.config_file import build
from koordlet.configuration.flags import parse_flags


def configured(*flags: str, **tree: Any) -> Config:
    """Return the configuration of these flags and of a file with this content, for node n1."""
    return build(
        {"nodeName": "n1", **tree},
        obj="test",
        flags=parse_flags(flags),
        environment={},
        mode=Mode.HOST,
    )

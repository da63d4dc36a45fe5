"""What the evictor remembers, on disk: a restart of the daemon evicts nothing twice for a shortage.

A gate's cool-down goes on, and pods that were evicted still count as released. Without this the
next daemon, which may start within the second, sees the same shortage and takes further victims
while the former ones are still ending. Containers that this daemon was still stopping do not count:
its end may leave them running. The file belongs to one boot, which also dates its moments.
"""

from __future__ import annotations

import logging
import os
from typing import Final

import msgspec

from apis.errors import printable
from koordlet.qos.eviction.past_rounds import Past
from service.files import replacing
from service.repeats import Repeats

_LOG = logging.getLogger("koordlet.qos")

FILE_NAME: Final = "evictions"
"""The name of the file in the run directory."""
_FORMAT: Final = "koordlet evictions 1"
_MOST_BYTES: Final = 4 << 20
"""Chosen: a larger file is not ours. 256 evicted pods have about 40 KiB."""
_MOST_OF_PROBLEM: Final = 300
"""Characters of a decoder's message: about three lines."""


class _File(msgspec.Struct, frozen=True):
    """dry_run: whether the evictions were left out; a daemon that evicts must not count them."""

    format: str
    boot: str
    dry_run: bool
    past: Past


_DECODER: Final = msgspec.json.Decoder(_File)


class PastFile:
    """The file of one daemon. No method raises OSError; each blocks for the file.

    boot: the id of this boot; "" where it is not known, and then nothing is kept.
    dry_run: whether this daemon leaves evictions out.
    """

    def __init__(self, path: str, *, boot: str, dry_run: bool) -> None:
        self._path = path
        self._boot = boot
        self._dry_run = dry_run
        self._repeats = Repeats()

    def load(self) -> Past:
        """Return what the last daemon kept; nothing, and a warning, without a usable file."""
        try:
            with open(self._path, "rb") as file:
                if os.fstat(file.fileno()).st_size > _MOST_BYTES:
                    raise ValueError(f"it has more than {_MOST_BYTES} bytes")
                found = _DECODER.decode(file.read())
            if found.format != _FORMAT:
                raise ValueError(f"it is not in this version's format: {found.format[:40]!r}")
        except FileNotFoundError:
            return Past()
        except (OSError, ValueError) as error:  # a msgspec.MsgspecError is a ValueError
            _LOG.warning(
                "the evictions of before the restart are lost, cool-downs begin again: %s: %s",
                self._path,
                printable(str(error))[:_MOST_OF_PROBLEM],
            )
            return Past()
        same = self._boot and found.boot == self._boot and found.dry_run == self._dry_run
        return found.past if same else Past()

    def save(self, past: Past) -> None:
        if not self._boot:
            return
        try:
            with replacing(self._path) as file:
                file.write(msgspec.json.encode(_File(_FORMAT, self._boot, self._dry_run, past)))
        except OSError as error:
            if self._repeats.due(type(error).__name__) is not None:
                _LOG.warning("cannot keep evictions for a restart of this daemon: %s", error)

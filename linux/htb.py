"""Traffic shaping of a network device: our HTB qdisc and its classes, over rtnetlink.

Everything of ours is below the handle `MAJOR`, which says who made it: a daemon that was killed
leaves nothing that its successor, or `koordlet restore`, could not recognise. The kernel gives the
device its default qdisc back when the root qdisc is deleted.

HTB takes the class of a packet from the packet's priority when that names one of its classes, and
the default class otherwise. Facts: docs/facts/kernel.md, "Traffic control".
"""

from __future__ import annotations

import struct
from typing import Any, Final

import msgspec

from linux.netlink import ACK, CREATE, EXCLUSIVE, ROUTE, Message, Netlink

MAJOR: Final = 0x4B4F
""""KO": of all handles that administrators and other programs choose, none is known to be this.
tc shows it as 4b4f:."""
ROOT: Final = 0xFFFFFFFF  # TC_H_ROOT
INGRESS: Final = 0xFFFFFFF1  # TC_H_INGRESS, the parent of the qdiscs ingress and clsact

_NEW_QDISC: Final = 36  # RTM_NEWQDISC
_DELETE_QDISC: Final = 37  # RTM_DELQDISC
_GET_QDISC: Final = 38  # RTM_GETQDISC
_NEW_CLASS: Final = 40  # RTM_NEWTCLASS
_DELETE_CLASS: Final = 41  # RTM_DELTCLASS
_GET_CLASS: Final = 42  # RTM_GETTCLASS

_TCM: Final = struct.Struct("=BxxxiIII")  # family, ifindex, handle, parent, info
_TICK_NS: Final = 64
"""The unit of the kernel's buffers (PSCHED_SHIFT)."""
_MAX_U32: Final = 0xFFFFFFFF
_ETHERNET: Final = 1
"""TC_LINKLAYER_ETHERNET: the kernel computes with the rate itself and needs no table of it."""
_INNER_QUANTUM: Final = 60_000
"""Of classes that only hold others: never used, but without one the kernel logs a warning."""
_VERSION: Final = 3  # of HTB's messages: TC_HTB_PROTOVER


class Qdisc(msgspec.Struct, frozen=True):
    """A queueing discipline. handle 0: the kernel made it by default. parent: ROOT, or a class."""

    index: int
    handle: int
    parent: int
    kind: str

    @property
    def ours(self) -> bool:
        return self.handle == MAJOR << 16 and self.kind == "htb"


class HtbClass(msgspec.Struct, frozen=True):
    """A class, as the kernel keeps it.

    parent: the class above, 0 for the qdisc. rate, ceil: bytes per second. buffer, cbuffer: bursts
    at rate and ceil, in ticks of 64 ns. quantum: bytes that a class may send before one of the same
    priority has its turn; 0 for a class that only holds others. prio: 0 is served first.
    """

    minor: int
    parent: int
    rate: int
    ceil: int
    buffer: int
    cbuffer: int
    quantum: int = 0
    prio: int = 0


def ticks(burst: int, rate: int) -> int:
    """Return the time that `burst` bytes take at `rate` bytes per second, in ticks."""
    return min(burst * 1_000_000_000 // rate // _TICK_NS, _MAX_U32)


def rate_text(bits: int) -> str:
    """Return a rate for people, as tc writes it. bits: per second."""
    for unit, size in (("Gbit/s", 10**9), ("Mbit/s", 10**6), ("kbit/s", 10**3)):
        if bits >= size:
            return f"{bits / size:.4g} {unit}"
    return f"{bits} bit/s"


class Shaping:
    """The qdiscs and classes of this network namespace. One thread at a time."""

    def __init__(self) -> None:
        """Raises OSError."""
        self._netlink = Netlink(ROUTE)

    def close(self) -> None:
        self._netlink.close()

    def qdiscs(self, index: int) -> tuple[Qdisc, ...]:
        """Return the qdiscs of the device, and ours on any device. Raises OSError."""

        def wanted(body: bytes) -> bool:
            _, device, handle, _, _ = _TCM.unpack_from(body)
            return bool(device == index or handle >> 16 == MAJOR)

        dumped = self._netlink.dump(Message(_GET_QDISC, 0, _TCM.pack(0, 0, 0, 0, 0)), wanted)
        return tuple(_qdisc(body) for body in dumped)

    def classes(self, index: int) -> dict[int, HtbClass]:
        """Return the classes of our qdisc on the device, by minor number. Raises OSError."""
        dumped = self._netlink.dump(
            Message(_GET_CLASS, 0, _TCM.pack(0, index, 0, 0, 0)),
            lambda body: bool(_TCM.unpack_from(body)[2] >> 16 == MAJOR),
        )
        found = (_class(body) for body in dumped)
        return {each.minor: each for each in found}

    def add_root(self, index: int, *, default: int) -> None:
        """Make our qdisc the root. default: the class of what no other takes.

        Raises OSError, with EEXIST while the device has a root qdisc that is not the kernel's own.
        """
        init = {
            "version": _VERSION,
            "rate2quantum": 10,  # unused, since every class has a quantum
            "defcls": default,
            "debug": 0,
            "direct_pkts": 0,
        }
        self._send(_NEW_QDISC, CREATE | EXCLUSIVE, index, 0, ROOT, [("TCA_HTB_INIT", init)])

    def delete_root(self, index: int) -> None:
        """Delete our qdisc with all classes: the kernel's default returns. Raises OSError."""
        self._send(_DELETE_QDISC, 0, index, 0, ROOT, None)

    def add(self, index: int, each: HtbClass) -> None:
        """Make a class. Raises OSError."""
        self._send_class(index, each, CREATE | EXCLUSIVE)

    def change(self, index: int, each: HtbClass) -> None:
        """Change a class in place, whatever is queued in it. Raises OSError."""
        self._send_class(index, each, 0)

    def delete(self, index: int, minor: int) -> None:
        """Delete a class without others below it; what is queued in it is lost. Raises OSError."""
        self._send(_DELETE_CLASS, 0, index, minor, 0, None)

    def _send_class(self, index: int, each: HtbClass, flags: int) -> None:
        options: list[tuple[str, object]] = [
            (
                "TCA_HTB_PARMS",
                {
                    "rate___reserved": _ETHERNET,
                    "rate": min(each.rate, _MAX_U32),
                    "ceil___reserved": _ETHERNET,
                    "ceil": min(each.ceil, _MAX_U32),
                    "buffer": each.buffer,
                    "cbuffer": each.cbuffer,
                    "quantum": each.quantum or _INNER_QUANTUM,
                    "prio": each.prio,
                },
            )
        ]
        # Rates of 34 Gbit/s and more do not fit into the 32 bits of the structure.
        if each.rate > _MAX_U32:
            options.append(("TCA_HTB_RATE64", each.rate))
        if each.ceil > _MAX_U32:
            options.append(("TCA_HTB_CEIL64", each.ceil))
        parent = MAJOR << 16 | each.parent if each.parent else ROOT
        self._send(_NEW_CLASS, flags, index, each.minor, parent, options)

    def _send(
        self,
        kind: int,
        flags: int,
        index: int,
        minor: int,
        parent: int,
        options: list[tuple[str, object]] | None,
    ) -> None:
        message = _codec()()
        message["index"] = index
        message["handle"] = MAJOR << 16 | minor
        message["parent"] = parent
        message["attrs"] = [("TCA_KIND", "htb")]
        if options is not None:
            message["attrs"].append(("TCA_OPTIONS", {"attrs": options}))
        message.encode()
        self._netlink.send([Message(kind, flags | ACK, bytes(message.data)[16:])])


def _codec() -> Any:
    """Return pyroute2's tcmsg; imported at its first use, since that costs 0.4 s and 23 MB."""
    from pyroute2.netlink.rtnl.tcmsg import tcmsg

    return tcmsg


def _decoded(kind: int, body: bytes) -> Any:
    message = _codec()(struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body)
    message.decode()
    return message


def _qdisc(body: bytes) -> Qdisc:
    _, index, handle, parent, _ = _TCM.unpack_from(body)
    # The kind is the first attribute: length, type 1, text.
    length, _ = struct.unpack_from("=HH", body, _TCM.size)
    kind = body[_TCM.size + 4 : _TCM.size + length].rstrip(b"\0").decode("ascii", "replace")
    return Qdisc(index, handle, parent, kind)


def _class(body: bytes) -> HtbClass:
    message = _decoded(_NEW_CLASS, body)
    options = message.get_attr("TCA_OPTIONS")
    own = options.get_attr("TCA_HTB_PARMS")
    leaf = own["level"] == 0
    return HtbClass(
        minor=message["handle"] & 0xFFFF,
        parent=0 if message["parent"] == ROOT else message["parent"] & 0xFFFF,
        rate=options.get_attr("TCA_HTB_RATE64") or own["rate"],
        ceil=options.get_attr("TCA_HTB_CEIL64") or own["ceil"],
        buffer=own["buffer"],
        cbuffer=own["cbuffer"],
        # The kernel keeps what a class had before others were put below it, and uses it no more.
        quantum=own["quantum"] if leaf else 0,
        prio=own["prio"] if leaf else 0,
    )

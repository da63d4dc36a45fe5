"""Which traffic class a packet belongs to: a table of nftables that gives packets their priority.

One table of ours, in which two maps lead from a source address (IPv4, IPv6) to a priority, and one
rule each looks there. HTB takes the class from the priority (`linux.htb`). A lookup costs the same
for one pod as for a thousand. The rules run in postrouting before addresses are translated, so
packets that leave under the node's address, or inside a tunnel, still have the pod's.
Facts: docs/facts/kernel.md, "Traffic control".
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from linux.htb import MAJOR
from linux.netlink import ACK, APPEND, CREATE, NETFILTER, Message, Netlink, NetlinkError

TABLE: Final = "koordlet-network"
_CHAIN: Final = "classify-1"
"""The number changes with the rules: a table of another version is replaced."""
_MAPS: Final = {"pods4": socket.AF_INET, "pods6": socket.AF_INET6}

_INET: Final = 1  # NFPROTO_INET
_POSTROUTING: Final = 4
_BEFORE_NAT: Final = -150
"""The priority of iptables' table mangle: connection tracking is at -200, address translation at
100."""
_SUBSYSTEM: Final = 10 << 8
_BEGIN: Final = 16
_END: Final = 17
_NEW_TABLE, _DELETE_TABLE = 0, 2
_NEW_CHAIN = 3
_NEW_RULE, _GET_RULE = 6, 7
_NEW_SET = 9
_NEW_ELEMENT, _GET_ELEMENT, _DELETE_ELEMENT = 12, 13, 14

_TYPE_IPV4, _TYPE_IPV6, _TYPE_CLASS = 7, 8, 23
"""What `nft list` shows keys and values as."""
_REGISTER: Final = 1
_META_PRIORITY: Final = 2
_META_FAMILY: Final = 15
_NETWORK_HEADER: Final = 1
_PER_MESSAGE: Final = 256
"""Elements of one message: an attribute holds 64 KiB, and an element takes at most 64 bytes."""


class PacketClasses:
    """The table in this network namespace. One thread at a time."""

    def __init__(self) -> None:
        """Raises OSError when the kernel has no netfilter."""
        self._netlink = Netlink(NETFILTER)

    def close(self) -> None:
        self._netlink.close()

    def read(self) -> dict[str, int] | None:
        """Return address -> minor number of the class; None if the table is not as we make it.

        Raises OSError.
        """
        try:
            rules = self._dump(_GET_RULE, _rules, [("NFTA_RULE_TABLE", TABLE)])
            if [rule.get_attr("NFTA_RULE_CHAIN") for rule in rules] != [_CHAIN] * len(_MAPS):
                return None
            found: dict[str, int] = {}
            for name, family in _MAPS.items():
                lists = self._dump(_GET_ELEMENT, _elements, _in_set(name))
                for part in lists:
                    for element in part.get_attr("NFTA_SET_ELEM_LIST_ELEMENTS") or ():
                        key = element.get_attr("NFTA_SET_ELEM_KEY").get_attr("NFTA_DATA_VALUE")
                        data = element.get_attr("NFTA_SET_ELEM_DATA").get_attr("NFTA_DATA_VALUE")
                        (priority,) = struct.unpack("=I", data)
                        found[socket.inet_ntop(family, key)] = (
                            priority & 0xFFFF if priority >> 16 == MAJOR else 0
                        )
        except NetlinkError as error:
            if error.errno != errno.ENOENT:
                raise
            return None  # it vanished while it was read
        return found

    def install(self, classes: Mapping[str, int]) -> None:
        """Make the table with these elements, in place of any former one, in one transaction.

        Raises OSError.
        """
        codec = _codec()
        messages = [
            # Made if it is not there, so that deleting it never fails.
            self._message(_NEW_TABLE, codec.nft_table_msg, [("NFTA_TABLE_NAME", TABLE)], CREATE),
            self._message(_DELETE_TABLE, codec.nft_table_msg, [("NFTA_TABLE_NAME", TABLE)]),
            self._message(_NEW_TABLE, codec.nft_table_msg, [("NFTA_TABLE_NAME", TABLE)], CREATE),
            self._message(_NEW_CHAIN, codec.nft_chain_msg, _chain(), CREATE),
        ]
        for number, (name, family) in enumerate(_MAPS.items(), 1):
            messages.append(
                self._message(_NEW_SET, codec.nft_set_msg, _map(name, family, number), CREATE)
            )
        for name, family in _MAPS.items():
            messages.append(
                self._message(_NEW_RULE, codec.nft_rule_msg, _rule(name, family), CREATE | APPEND)
            )
        self._transaction([*messages, *self._added(classes)])

    def change(self, add: Mapping[str, int], remove: Iterable[str]) -> None:
        """Remove addresses, then add some, in one transaction. Raises OSError."""
        messages = [
            self._message(
                _DELETE_ELEMENT,
                _codec().nft_set_elem_list_msg,
                [*_in_set(name), ("NFTA_SET_ELEM_LIST_ELEMENTS", part)],
            )
            for name, part in _parts(dict.fromkeys(remove))
        ]
        messages += self._added(add)
        if messages:
            self._transaction(messages)

    def remove(self) -> bool:
        """Remove the table; return whether it was there. Raises OSError."""
        try:
            self._transaction(
                [self._message(_DELETE_TABLE, _codec().nft_table_msg, [("NFTA_TABLE_NAME", TABLE)])]
            )
        except NetlinkError as error:
            if error.errno != errno.ENOENT:
                raise
            return False
        return True

    def _added(self, classes: Mapping[str, int]) -> list[Message]:
        return [
            self._message(
                _NEW_ELEMENT,
                _codec().nft_set_elem_list_msg,
                [*_in_set(name), ("NFTA_SET_ELEM_LIST_ELEMENTS", part)],
                CREATE,
            )
            for name, part in _parts(classes)
        ]

    def _transaction(self, messages: list[Message]) -> None:
        border = struct.pack("!BBH", 0, 0, _SUBSYSTEM >> 8)
        self._netlink.send([Message(_BEGIN, 0, border), *messages, Message(_END, 0, border)])

    def _message(
        self, kind: int, codec: Any, attributes: list[tuple[str, Any]], flags: int = 0
    ) -> Message:
        message = codec()
        message["nfgen_family"] = _INET
        message["attrs"] = attributes
        message.encode()
        return Message(_SUBSYSTEM | kind, flags | ACK, bytes(message.data)[16:])

    def _dump(
        self, kind: int, codec: Callable[[], Any], attributes: list[tuple[str, Any]]
    ) -> list[Any]:
        request = self._message(kind, codec(), attributes)
        decoded = []
        for body in self._netlink.dump(request._replace(flags=0)):
            message = codec()(struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body)
            message.decode()
            decoded.append(message)
        return decoded


def _codec() -> Any:
    """Return pyroute2's module; imported at its first use, since that costs 0.4 s and 23 MB."""
    from pyroute2.netlink.nfnetlink import nftsocket

    return nftsocket


def _rules() -> Any:
    return _codec().nft_rule_msg


def _elements() -> Any:
    return _codec().nft_set_elem_list_msg


def _in_set(name: str) -> list[tuple[str, Any]]:
    return [("NFTA_SET_ELEM_LIST_TABLE", TABLE), ("NFTA_SET_ELEM_LIST_SET", name)]


def _chain() -> list[tuple[str, Any]]:
    hook = [("NFTA_HOOK_HOOKNUM", _POSTROUTING), ("NFTA_HOOK_PRIORITY", _BEFORE_NAT)]
    return [
        ("NFTA_CHAIN_TABLE", TABLE),
        ("NFTA_CHAIN_NAME", _CHAIN),
        ("NFTA_CHAIN_HOOK", {"attrs": hook}),
        ("NFTA_CHAIN_TYPE", "filter"),
    ]


def _map(name: str, family: int, number: int) -> list[tuple[str, Any]]:
    v4 = family == socket.AF_INET
    return [
        ("NFTA_SET_TABLE", TABLE),
        ("NFTA_SET_NAME", name),
        ("NFTA_SET_FLAGS", {"NFT_SET_MAP"}),
        ("NFTA_SET_KEY_TYPE", _TYPE_IPV4 if v4 else _TYPE_IPV6),
        ("NFTA_SET_KEY_LEN", 4 if v4 else 16),
        ("NFTA_SET_DATA_TYPE", _TYPE_CLASS),
        ("NFTA_SET_DATA_LEN", 4),
        ("NFTA_SET_ID", number),
    ]


def _rule(name: str, family: int) -> list[tuple[str, Any]]:
    """Return the rule: of this family -> source address -> priority, if the map has the address."""
    codec = _codec()
    register = codec.Regs(_REGISTER)
    offset, length = (12, 4) if family == socket.AF_INET else (8, 16)
    is_family = bytes([2 if family == socket.AF_INET else 10])  # NFPROTO_IPV4, NFPROTO_IPV6
    expressions = [
        ("meta", [("NFTA_META_DREG", register), ("NFTA_META_KEY", codec.Meta(_META_FAMILY))]),
        (
            "cmp",
            [
                ("NFTA_CMP_SREG", register),
                ("NFTA_CMP_OP", codec.Cmp.NFT_CMP_EQ),
                ("NFTA_CMP_DATA", _data(is_family)),
            ],
        ),
        (
            "payload",
            [
                ("NFTA_PAYLOAD_DREG", register),
                ("NFTA_PAYLOAD_BASE", _NETWORK_HEADER),
                ("NFTA_PAYLOAD_OFFSET", offset),
                ("NFTA_PAYLOAD_LEN", length),
            ],
        ),
        (
            "lookup",
            [
                ("NFTA_LOOKUP_SET", name),
                ("NFTA_LOOKUP_SREG", register),
                ("NFTA_LOOKUP_DREG", register),
            ],
        ),
        ("meta", [("NFTA_META_KEY", codec.Meta(_META_PRIORITY)), ("NFTA_META_SREG", register)]),
    ]
    return [
        ("NFTA_RULE_TABLE", TABLE),
        ("NFTA_RULE_CHAIN", _CHAIN),
        (
            "NFTA_RULE_EXPRESSIONS",
            [
                {"attrs": [("NFTA_EXPR_NAME", kind), ("NFTA_EXPR_DATA", {"attrs": attributes})]}
                for kind, attributes in expressions
            ],
        ),
    ]


def _data(value: bytes) -> dict[str, Any]:
    return {"attrs": [("NFTA_DATA_VALUE", value)]}


def _parts(classes: Mapping[str, int | None]) -> list[tuple[str, list[Any]]]:
    """Return the elements by map, in portions that one message holds."""
    parts = []
    for name, family in _MAPS.items():
        elements = []
        for address, minor in sorted(classes.items()):
            if (":" in address) != (family == socket.AF_INET6):
                continue
            attributes = [("NFTA_SET_ELEM_KEY", _data(socket.inet_pton(family, address)))]
            if minor is not None:
                priority = struct.pack("=I", MAJOR << 16 | minor)
                attributes.append(("NFTA_SET_ELEM_DATA", _data(priority)))
            elements.append({"attrs": attributes})
        parts += [
            (name, elements[at : at + _PER_MESSAGE]) for at in range(0, len(elements), _PER_MESSAGE)
        ]
    return parts

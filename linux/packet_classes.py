"""Which traffic class a packet belongs to: a table of nftables that gives packets their priority.

One table of ours. Two maps lead from a source address (IPv4, IPv6) to a priority, and one rule each
looks there. HTB takes the class from the priority (`linux.htb`). A lookup costs the same for one
member as for a thousand. The rules run in postrouting before addresses are translated, so packets
that leave under the node's address, or inside a tunnel, still have the pod's.

Processes on the node's network have the node's address. On cgroup v2 the group of the socket
distinguishes their packets: for each level of the tree at which members are, a map and a rule at
the output of the node.

Facts: docs/facts/kernel.md, "Traffic control".
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from linux.htb import MAJOR
from linux.netlink import (
    ACK,
    APPEND,
    CREATE,
    NESTED,
    NETFILTER,
    Message,
    Netlink,
    NetlinkError,
    attribute,
    attributes,
)

TABLE: Final = "koordlet-network"
_CHAIN: Final = "classify-1"
"""The number changes with the rules: a table of another version is replaced."""
_MAPS: Final = {"pods4": socket.AF_INET, "pods6": socket.AF_INET6}
_GROUPS: Final = "groups"
"""The chain and the map of one level: with its number behind it."""

_INET: Final = 1  # NFPROTO_INET
_OUTPUT: Final = 3
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

_RULE_CHAIN: Final = 2  # NFTA_RULE_CHAIN
_FAMILY_HEADER: Final = 4  # bytes of struct nfgenmsg
_TYPE_IPV4, _TYPE_IPV6, _TYPE_CLASS, _TYPE_GROUP = 7, 8, 23, 46
"""What `nft list` shows keys and values as."""
_REGISTER: Final = 1
_META_PRIORITY: Final = 2
_META_FAMILY: Final = 15
_SOCKET_GROUP: Final = 3  # NFT_SOCKET_CGROUPV2
_NETWORK_HEADER: Final = 1
_PER_MESSAGE: Final = 256
"""Elements of one message: an attribute holds 64 KiB, and an element takes at most 64 bytes."""


class Group(NamedTuple):
    """A group of cgroup v2 by its inode, and how many levels below the root it is (1: next to)."""

    level: int
    inode: int


Member = str | Group
"""What packets are distinguished by: their source address, or the group of their socket."""


def levels_of(members: Iterable[Member]) -> frozenset[int]:
    """Return the levels at which groups are members."""
    return frozenset(each.level for each in members if isinstance(each, Group))


class Present(NamedTuple):
    """What the table holds: the minor numbers of the members' classes, and the levels of groups."""

    members: dict[Member, int]
    levels: frozenset[int]


class PacketClasses:
    """The table in this network namespace. One thread at a time."""

    def __init__(self) -> None:
        """Raises OSError when the kernel has no netfilter."""
        self._netlink = Netlink(NETFILTER)

    def close(self) -> None:
        self._netlink.close()

    def read(self) -> Present | None:
        """Return what the table holds; None if it is not as we make it. Raises OSError."""
        try:
            chains = self._chains_of_rules()
            levels = [int(chain.removeprefix(_GROUPS)) for chain in chains if _is_groups(chain)]
            ours = [_CHAIN] * len(_MAPS) + [f"{_GROUPS}{level}" for level in levels]
            if sorted(chains) != sorted(ours):
                return None
            found: dict[Member, int] = {}
            for name in (*_MAPS, *(f"{_GROUPS}{level}" for level in levels)):
                for part in self._dump(_GET_ELEMENT, _elements, _in_set(name)):
                    for element in part.get_attr("NFTA_SET_ELEM_LIST_ELEMENTS") or ():
                        key = element.get_attr("NFTA_SET_ELEM_KEY").get_attr("NFTA_DATA_VALUE")
                        data = element.get_attr("NFTA_SET_ELEM_DATA").get_attr("NFTA_DATA_VALUE")
                        (priority,) = struct.unpack("=I", data)
                        found[_member(name, key)] = (
                            priority & 0xFFFF if priority >> 16 == MAJOR else 0
                        )
        except NetlinkError as error:
            if error.errno != errno.ENOENT:
                raise
            return None  # it vanished while it was read
        return Present(found, frozenset(levels))

    def install(self, classes: Mapping[Member, int]) -> None:
        """Make the table with these members, in place of any former one, in one transaction.

        Raises OSError; with ENOENT, EOPNOTSUPP or EINVAL perhaps because of groups, which the
        kernel knows since 5.13, if it was built with them.
        """
        codec = _codec()
        messages = [
            # Made if it is not there, so that deleting it never fails.
            self._message(_NEW_TABLE, codec.nft_table_msg, [("NFTA_TABLE_NAME", TABLE)], CREATE),
            self._message(_DELETE_TABLE, codec.nft_table_msg, [("NFTA_TABLE_NAME", TABLE)]),
            self._message(_NEW_TABLE, codec.nft_table_msg, [("NFTA_TABLE_NAME", TABLE)], CREATE),
            self._message(_NEW_CHAIN, codec.nft_chain_msg, _chain(_CHAIN, _POSTROUTING), CREATE),
        ]
        levels = sorted(levels_of(classes))
        for number, name in enumerate([*_MAPS, *(f"{_GROUPS}{level}" for level in levels)], 1):
            messages.append(self._message(_NEW_SET, codec.nft_set_msg, _map(name, number), CREATE))
        for name, family in _MAPS.items():
            messages.append(
                self._message(_NEW_RULE, codec.nft_rule_msg, _rule(name, family), CREATE | APPEND)
            )
        for level in levels:
            chain = _chain(f"{_GROUPS}{level}", _OUTPUT)
            messages.append(self._message(_NEW_CHAIN, codec.nft_chain_msg, chain, CREATE))
            messages.append(_group_rule(level))
        self._transaction([*messages, *self._added(classes)])

    def change(self, add: Mapping[Member, int], remove: Iterable[Member]) -> None:
        """Remove members, then add some, in one transaction. Groups are of levels that the table
        has. Raises OSError."""
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

    def _added(self, classes: Mapping[Member, int]) -> list[Message]:
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

    def _chains_of_rules(self) -> list[str]:
        """Return the chain of each rule of the table; the rest of a rule is not decoded."""
        rules = self._message(
            _GET_RULE, _codec().nft_rule_msg, [("NFTA_RULE_TABLE", TABLE)]
        )._replace(flags=0)
        return [
            attributes(body[_FAMILY_HEADER:])
            .get(_RULE_CHAIN, b"")
            .rstrip(b"\0")
            .decode("ascii", "replace")
            for body in self._netlink.dump(rules)
        ]

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


def _elements() -> Any:
    return _codec().nft_set_elem_list_msg


def _in_set(name: str) -> list[tuple[str, Any]]:
    return [("NFTA_SET_ELEM_LIST_TABLE", TABLE), ("NFTA_SET_ELEM_LIST_SET", name)]


def _chain(name: str, at: int) -> list[tuple[str, Any]]:
    hook = [("NFTA_HOOK_HOOKNUM", at), ("NFTA_HOOK_PRIORITY", _BEFORE_NAT)]
    return [
        ("NFTA_CHAIN_TABLE", TABLE),
        ("NFTA_CHAIN_NAME", name),
        ("NFTA_CHAIN_HOOK", {"attrs": hook}),
        ("NFTA_CHAIN_TYPE", "filter"),
    ]


def _map(name: str, number: int) -> list[tuple[str, Any]]:
    keys = {"pods4": (_TYPE_IPV4, 4), "pods6": (_TYPE_IPV6, 16)}
    kind, length = keys.get(name, (_TYPE_GROUP, 8))
    return [
        ("NFTA_SET_TABLE", TABLE),
        ("NFTA_SET_NAME", name),
        ("NFTA_SET_FLAGS", {"NFT_SET_MAP"}),
        ("NFTA_SET_KEY_TYPE", kind),
        ("NFTA_SET_KEY_LEN", length),
        ("NFTA_SET_DATA_TYPE", _TYPE_CLASS),
        ("NFTA_SET_DATA_LEN", 4),
        ("NFTA_SET_ID", number),
    ]


def _is_groups(chain: str) -> bool:
    return chain.startswith(_GROUPS) and chain.removeprefix(_GROUPS).isdecimal()


def _map_of(member: Member) -> str:
    if isinstance(member, Group):
        return f"{_GROUPS}{member.level}"
    return "pods6" if ":" in member else "pods4"


def _key(member: Member) -> bytes:
    if isinstance(member, Group):
        return struct.pack("=Q", member.inode)
    return socket.inet_pton(_MAPS[_map_of(member)], member)


def _member(name: str, key: bytes) -> Member:
    if (family := _MAPS.get(name)) is not None:
        return socket.inet_ntop(family, key)
    return Group(int(name.removeprefix(_GROUPS)), struct.unpack("=Q", key)[0])


def _group_rule(level: int) -> Message:
    """Return the rule: group of the socket at this level -> priority, if the map has the group.

    Encoded here: pyroute2 does not know the level of the expression `socket`.
    """
    name = f"{_GROUPS}{level}".encode() + b"\0"

    def number(kind: int, value: int) -> bytes:
        return attribute(kind, struct.pack("!I", value))

    def expression(kind: bytes, *parts: bytes) -> bytes:
        data = attribute(2 | NESTED, b"".join(parts))
        return attribute(1 | NESTED, attribute(1, kind + b"\0") + data)

    expressions = (
        expression(b"socket", number(1, _SOCKET_GROUP), number(2, _REGISTER), number(3, level))
        + expression(b"lookup", attribute(1, name), number(2, _REGISTER), number(3, _REGISTER))
        + expression(b"meta", number(2, _META_PRIORITY), number(3, _REGISTER))
    )
    body = (
        struct.pack("!BBH", _INET, 0, 0)
        + attribute(1, TABLE.encode() + b"\0")
        + attribute(_RULE_CHAIN, name)
        + attribute(4 | NESTED, expressions)
    )
    return Message(_SUBSYSTEM | _NEW_RULE, CREATE | APPEND | ACK, body)


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


def _parts(classes: Mapping[Member, int | None]) -> list[tuple[str, list[Any]]]:
    """Return the elements by map, in portions that one message holds."""
    by_map: dict[str, list[Any]] = {}
    for member, minor in classes.items():
        parts = [("NFTA_SET_ELEM_KEY", _data(_key(member)))]
        if minor is not None:
            parts.append(("NFTA_SET_ELEM_DATA", _data(struct.pack("=I", MAJOR << 16 | minor))))
        by_map.setdefault(_map_of(member), []).append({"attrs": parts})
    return [
        (name, elements[at : at + _PER_MESSAGE])
        for name, elements in by_map.items()
        for at in range(0, len(elements), _PER_MESSAGE)
    ]

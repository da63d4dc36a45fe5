"""Header blocks: a decoder that keeps in step with a peer, an encoder that has no state.

The proxy passes header blocks through unchanged, so both ends' compression contexts stay in step
by themselves; the decoder follows the client's side only to read `:path` and `grpc-timeout`. What
we send ourselves is written as literals without indexing, which leaves the receiver's table alone
(RFC 7541, section 6.2.2) and can therefore be put between the blocks of another sender.
"""

from collections import deque
from collections.abc import Iterable
from functools import lru_cache

from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

from runtime_proxy.http2.frames import ConnectionFault, ErrorCode

Header = tuple[bytes, bytes]

_STATIC: tuple[Header, ...] = tuple((bytes(n), bytes(v)) for n, v in HeaderTable.STATIC_TABLE)
_STATIC_COUNT = len(_STATIC)
_STATIC_NAME_INDEX = {name: at + 1 for at, (name, _) in reversed(list(enumerate(_STATIC)))}
_ENTRY_OVERHEAD = 32
DEFAULT_TABLE_SIZE = 4096
# Of the table of a receiver that announces a larger one. Chosen: 256 times the default, with which
# gRPC's implementations work. Twice the value: a hostile peer can make us keep twice as much.
_LARGEST_TABLE_SIZE = 1024 * 1024
# A decoded list larger than this is refused: grpc-go's own servers take 16 MiB, kubelet sends 300
# bytes, and a small block can name a large table entry again and again.
_MAX_DECODED_SIZE = 4 * 1024 * 1024
# No integer of a header block means anything above this; it bounds the continuation bytes.
_MAX_INTEGER = 2**31


def _fault(reason: str) -> ConnectionFault:
    return ConnectionFault(ErrorCode.COMPRESSION_ERROR, reason)


@lru_cache(maxsize=256)
def _huffman(coded: bytes) -> bytes:
    try:
        return decode_huffman(coded)
    except Exception as error:
        raise _fault(f"bad Huffman string: {error}") from error


class Decoder:
    """One direction's dynamic table and the reading of its blocks, in order, each exactly once."""

    __slots__ = ("_entries", "_limit", "_max_size", "_size")

    def __init__(self) -> None:
        self._entries: deque[Header] = deque()
        self._size = 0
        self._max_size = DEFAULT_TABLE_SIZE
        self._limit = DEFAULT_TABLE_SIZE

    def set_limit(self, limit: int) -> None:
        """The receiver announced SETTINGS_HEADER_TABLE_SIZE: the encoder may go up to it.

        A smaller announcement binds the encoder only once it has seen it, and the receiver itself
        enforces it; we follow and only need to bound our own memory.
        """
        self._limit = max(self._limit, min(limit, _LARGEST_TABLE_SIZE))

    def decode(self, block: bytes) -> list[Header]:
        headers: list[Header] = []
        append = headers.append
        entries = self._entries
        total = 0
        at = 0
        end = len(block)
        try:
            while at < end:
                first = block[at]
                if first & 0x80:  # an indexed field
                    index = first & 0x7F
                    at += 1
                    if index == 0x7F:
                        index, at = _continued_integer(block, at, 0x7F)
                    header = self._entry(index)
                elif first & 0x40:  # a literal that joins the table
                    header, at = self._literal(block, at, 0x3F)
                    size = len(header[0]) + len(header[1]) + _ENTRY_OVERHEAD
                    entries.appendleft(header)
                    self._size += size
                    if self._size > self._max_size:
                        self._evict()
                elif first & 0x20:  # the table changes its size
                    if headers:
                        raise _fault("table size update after the first field")
                    size = first & 0x1F
                    at += 1
                    if size == 0x1F:
                        size, at = _continued_integer(block, at, 0x1F)
                    if size > self._limit:
                        raise _fault(f"table size {size} above the announced {self._limit}")
                    self._max_size = size
                    self._evict()
                    continue
                else:  # a literal that stays out of the table
                    header, at = self._literal(block, at, 0x0F)
                append(header)
                total += len(header[0]) + len(header[1])
                if total > _MAX_DECODED_SIZE:
                    raise ConnectionFault(
                        ErrorCode.ENHANCE_YOUR_CALM, "header list larger than 4 MiB"
                    )
        except IndexError as error:
            raise _fault("header block ends inside a field") from error
        return headers

    def _entry(self, index: int) -> Header:
        if index <= _STATIC_COUNT:
            if index == 0:
                raise _fault("index 0")
            return _STATIC[index - 1]
        index -= _STATIC_COUNT + 1
        if index >= len(self._entries):
            raise _fault(f"index {index + _STATIC_COUNT + 1} is beyond the table")
        return self._entries[index]

    def _literal(self, block: bytes, at: int, mask: int) -> tuple[Header, int]:
        index = block[at] & mask
        at += 1
        if index == mask:
            index, at = _continued_integer(block, at, mask)
        if index:
            name = self._entry(index)[0]
        else:
            name, at = _string(block, at)
        value, at = _string(block, at)
        return (name, value), at

    def _evict(self) -> None:
        entries = self._entries
        while self._size > self._max_size and entries:
            name, value = entries.pop()
            self._size -= len(name) + len(value) + _ENTRY_OVERHEAD


def _continued_integer(block: bytes, at: int, value: int) -> tuple[int, int]:
    shift = 0
    while True:
        octet = block[at]
        at += 1
        value += (octet & 0x7F) << shift
        if value > _MAX_INTEGER:
            raise _fault("integer too large")
        if not octet & 0x80:
            return value, at
        shift += 7
        if shift > 35:
            raise _fault("integer with endless continuation")


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    first = block[at]
    length = first & 0x7F
    at += 1
    if length == 0x7F:
        length, at = _continued_integer(block, at, 0x7F)
    end = at + length
    if end > len(block):
        raise _fault("string longer than its block")
    text = block[at:end]
    if not first & 0x80:
        return text, end
    # Short strings repeat from call to call; a long one is not worth the memory of a cache.
    return (_huffman(text) if length <= 64 else _huffman.__wrapped__(text)), end


def _integer(value: int, prefix_bits: int, pattern: int) -> bytes:
    mask = (1 << prefix_bits) - 1
    if value < mask:
        return bytes((pattern | value,))
    out = bytearray((pattern | mask,))
    value -= mask
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def table_size_update(size: int) -> bytes:
    """What the first block after a receiver's smaller table must begin with (RFC 7541, 4.2).

    An encoder that shrank its own table says so again in its next block, to the same effect.
    """
    return _integer(size, 5, 0x20)


class ReceiversTable:
    """The table of a decoder that gets a peer's blocks, and at times one of ours between them.

    Where the receiver has allowed less than its table has, the next block has to begin with that.
    """

    __slots__ = ("_allowed", "_size")

    def __init__(self) -> None:
        self._size = DEFAULT_TABLE_SIZE
        # The least that was allowed since the last block.
        self._allowed = _MAX_INTEGER

    def allow(self, sizes: Iterable[int]) -> None:
        """The encoder has acknowledged the receiver's settings."""
        for size in sizes:
            self._allowed = min(self._allowed, size)

    def follow(self, block: bytes) -> None:
        """The other sender's block: the sizes that it begins with are the table's from here on."""
        self._allowed = _MAX_INTEGER
        at = 0
        while at < len(block) and block[at] >> 5 == 1:
            self._size = block[at] & 0x1F
            at += 1
            if self._size == 0x1F:
                try:
                    self._size, at = _continued_integer(block, at, 0x1F)
                except IndexError as error:
                    raise _fault("header block ends inside a size") from error

    def update(self) -> bytes:
        """What our own block, sent now, has to begin with."""
        if self._allowed >= self._size:
            return b""
        self._size = self._allowed
        return table_size_update(self._size)


def encode(headers: Iterable[Header]) -> bytes:
    """A block of literals without indexing: valid in any table state, changing none."""
    out = bytearray()
    for name, value in headers:
        index = _STATIC_NAME_INDEX.get(name, 0)
        out += _integer(index, 4, 0x00)
        if not index:
            out += _integer(len(name), 7, 0x00) + name
        out += _integer(len(value), 7, 0x00) + value
    return bytes(out)

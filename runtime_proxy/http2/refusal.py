"""A server that answers every call with one status: what stands in while the runtime is away.

The runtime's own socket would refuse the connection, and a gRPC client would then wait out a
growing back-off (kubelet: up to 3 s) after the runtime's return. Refusing calls on a live
connection fails them as fast and with the same code, and `leave` sends the client away the moment
the runtime is back: a client reconnects at once after GOAWAY.
"""

from runtime_proxy.http2 import frames, hpack
from runtime_proxy.http2.frames import FRAME_HEADER, HEADER_SIZE, ConnectionFault, ErrorCode
from runtime_proxy.http2.grpc import Status, status_headers


class Refusal:
    """Feed `receive`, take `output`. Header blocks are skipped, never decoded."""

    def __init__(self, status: Status) -> None:
        self.output: list[bytes] = []
        self.last_stream = 0
        self.refused = 0
        self._answer = hpack.encode(status_headers(status, trailers=False))
        self._client_table = hpack.ReceiversTable()
        self._preface_seen = False
        self._rest = b""
        self._block_stream = 0
        self._block_flags = 0
        self._block_size = 0
        self._left = False

    def receive(self, data: bytes) -> None:
        buffer = self._rest + data
        at = 0
        if not self._preface_seen:
            if not frames.PREFACE.startswith(buffer[: len(frames.PREFACE)]):
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "no HTTP/2 connection preface")
            if len(buffer) < len(frames.PREFACE):
                self._rest = buffer
                return
            self._preface_seen = True
            at = len(frames.PREFACE)
            self.output.append(frames.settings({}))
        while len(buffer) - at >= HEADER_SIZE:
            high, low, kind, flags, stream = FRAME_HEADER.unpack_from(buffer, at)
            length = high << 8 | low
            if length > frames.DEFAULT_MAX_FRAME_SIZE:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"frame of {length} octets")
            end = at + HEADER_SIZE + length
            if end > len(buffer):
                break
            self._frame(kind, flags, stream & frames.STREAM_MASK, buffer[at + HEADER_SIZE : end])
            at = end
        self._rest = buffer[at:]

    def leave(self) -> None:
        """Send the client away; calls that it sends from here on were not processed."""
        if not self._left:
            self._left = True
            self.output.append(frames.goaway(self.last_stream, ErrorCode.NO_ERROR, "runtime is up"))

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if self._block_stream and kind != frames.CONTINUATION:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "frame inside a header block")
        if kind == frames.HEADERS:
            self._block_stream, self._block_flags, self._block_size = stream, flags, len(payload)
            self._end_block(flags)
        elif kind == frames.CONTINUATION:
            if stream != self._block_stream or not stream:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
            self._block_size += HEADER_SIZE + len(payload)
            if self._block_size > frames.MAX_CLIENT_BLOCK:
                raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "header block above 256 KiB")
            self._end_block(flags)
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            for identifier, value in frames.parse_settings(payload):
                if identifier == frames.SETTING_HEADER_TABLE_SIZE:
                    self._client_table.allow([value])
            self.output.append(frames.SETTINGS_ACK)
        elif kind == frames.PING and not flags & frames.ACK:
            self.output.append(frames.ping_ack(payload))
        elif kind == frames.DATA and payload:
            self.output.append(frames.window_update(0, len(payload)))

    def _end_block(self, flags: int) -> None:
        if not flags & frames.END_HEADERS:
            return
        stream, self._block_stream = self._block_stream, 0
        if stream <= self.last_stream or self._left:
            return
        self.last_stream = stream
        self.refused += 1
        self.output.append(
            frames.frame(
                frames.HEADERS,
                frames.END_STREAM | frames.END_HEADERS,
                stream,
                self._client_table.update() + self._answer,
            )
        )
        if not self._block_flags & frames.END_STREAM:
            # The client may stop sending: its request is not read.
            self.output.append(frames.rst_stream(stream, ErrorCode.NO_ERROR))

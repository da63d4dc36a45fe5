"""What client and server have announced in SETTINGS, and since when it holds.

A setting holds for its receiver from its arrival, for its sender once it is acknowledged. We are
the server's client, so its settings bind us when the client's acknowledgement goes on to it; and we
are the client's server, so its smaller table binds us by the server's acknowledgement.
"""

from collections import deque

from runtime_proxy.http2 import frames, hpack
from runtime_proxy.http2.flow import Flow
from runtime_proxy.http2.held import Held


class Settings:
    def __init__(self, flow: Flow, held: dict[int, Held], decoder: hpack.Decoder) -> None:
        # The server's window for a new stream: what the client may use, and what we may.
        self.initial_window = frames.DEFAULT_WINDOW
        self.confirmed_window = frames.DEFAULT_WINDOW
        self.client_table = hpack.ReceiversTable()
        self._flow = flow
        self._held = held
        self._decoder = decoder
        # Whose SETTINGS the server has yet to acknowledge, in order: a rejected stream, or 0 for
        # the client with the header tables that it allows.
        self._unacknowledged: deque[tuple[int, list[int]]] = deque()
        # Settings of the server's that the client has yet to acknowledge.
        self._unconfirmed: deque[list[tuple[int, int]]] = deque()

    def client_told(self, payload: bytes) -> None:
        tables: list[int] = []
        passage = self._flow.to_client
        for identifier, value in frames.parse_settings(payload):
            if identifier == frames.SETTING_MAX_FRAME_SIZE:
                passage.max_frame_size = max(passage.max_frame_size, value)
            elif identifier == frames.SETTING_HEADER_TABLE_SIZE:
                tables.append(value)
        self._unacknowledged.append((0, tables))

    def probe(self, rejected: int) -> None:
        """Ask the server, by empty settings, to say when it has seen all that we sent it."""
        self._unacknowledged.append((rejected, []))
        self._flow.to_server.put(frames.settings({}))

    def server_acknowledges(self) -> int:
        """The rejected stream whose probe this answers, or 0 where it answers the client."""
        if not self._unacknowledged:
            return 0
        rejected, tables = self._unacknowledged.popleft()
        self.client_table.allow(tables)
        return rejected

    def server_told(self, payload: bytes) -> None:
        """What holds for the client from here on; for us it does once the client has said so."""
        passage = self._flow.to_server
        pairs = frames.parse_settings(payload)
        self._unconfirmed.append(pairs)
        for identifier, value in pairs:
            if identifier == frames.SETTING_INITIAL_WINDOW_SIZE:
                for held in self._held.values():
                    held.client_window += value - self.initial_window
                self.initial_window = value
            elif identifier == frames.SETTING_MAX_FRAME_SIZE:
                passage.max_frame_size = max(passage.max_frame_size, value)
            elif identifier == frames.SETTING_HEADER_TABLE_SIZE:
                self._decoder.set_limit(value)

    def client_acknowledges(self) -> bool:
        """Apply the oldest unacknowledged settings, and return whether there were any."""
        if not self._unconfirmed:
            return False
        for identifier, value in self._unconfirmed.popleft():
            if identifier == frames.SETTING_INITIAL_WINDOW_SIZE:
                for held in self._held.values():
                    held.server_window += value - self.confirmed_window
                self.confirmed_window = value
            elif identifier == frames.SETTING_MAX_FRAME_SIZE:
                self._flow.sending.max_frame_size = value
        return True

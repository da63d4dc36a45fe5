"""What the relay itself has to say, and when: waiting data, windows, frames of ours for the client.

The server's SETTINGS are the first frame that the client sees: what we have for it before waits
`behind` them.
"""

from runtime_proxy.http2 import frames
from runtime_proxy.http2.held import Held
from runtime_proxy.http2.passage import Passage
from runtime_proxy.http2.sending import Sending


class Flow:
    def __init__(self, *, to_client: Passage, to_server: Passage, held: dict[int, Held]) -> None:
        self.to_client = to_client
        self.to_server = to_server
        self.sending = Sending()
        self.server_known = False
        self._held = held
        self._behind: list[bytes] = []

    def tell_client(self, frame: bytes) -> None:
        if self.server_known:
            self.to_client.put(frame)
        else:
            self._behind.append(frame)

    def tell_client_behind(self, frame: bytes) -> None:
        """Behind the server's frames that are being read, too."""
        self._behind.append(frame)

    def pump(self) -> None:
        """Send what may go by now."""
        if self.sending.queue:
            for octets in self.sending.pump():
                self.to_server.put(octets)
            for stream, padding in self.sending.take_stripped():
                self.tell_client(frames.window_update(stream, padding))
        self.settle()

    def settle(self) -> None:
        """Give the client the window that it is owed."""
        if granted := self.sending.grant(self._held.values()):
            self.tell_client(frames.window_update(0, granted))
        if self._behind and self.server_known:
            self.to_client.out += self._behind
            self._behind.clear()

"""Requests that the relay holds: the state of each, and the events about it.

A held request is one of an intercepted method. Its stream's windows are kept here for both sides,
because what the client sends and what the server gets part ways while the message waits.
"""

import enum
from dataclasses import dataclass, field

from runtime_proxy.http2.grpc import MESSAGE_PREFIX_SIZE, Status


class Phase(enum.Enum):
    RECEIVING = enum.auto()
    DECIDING = enum.auto()
    SENDING = enum.auto()
    WAITING = enum.auto()
    REJECTING = enum.auto()
    ENDED = enum.auto()


@dataclass(slots=True)
class Held:
    """A stream whose request message is ours to send.

    `counted` says that the `received_flow` octets are among the connection's queued ones.
    """

    stream: int
    path: bytes
    timeout_s: float | None
    encoding: bytes
    client_window: int
    server_window: int
    phase: Phase = Phase.RECEIVING
    body: bytearray = field(default_factory=bytearray)
    received_flow: int = 0
    counted: bool = True
    client_ended: bool = False
    answer: bytearray = field(default_factory=bytearray)
    answer_started: bool = False
    rejection: Status | None = None

    @property
    def waits_for_us(self) -> bool:
        return self.phase is Phase.RECEIVING or self.phase is Phase.DECIDING

    @property
    def body_size(self) -> int:
        """Octets of the whole body with its prefix, as far as is known yet."""
        if len(self.body) < MESSAGE_PREFIX_SIZE:
            return MESSAGE_PREFIX_SIZE
        announced = int.from_bytes(self.body[1:MESSAGE_PREFIX_SIZE], "big")
        return MESSAGE_PREFIX_SIZE + announced


@dataclass(frozen=True, slots=True)
class RequestHeld:
    """A whole intercepted request: answer with `release` or `reject`, or let `Abandoned` end it.

    `body` is the gRPC body as sent, message prefix included.
    """

    stream: int
    path: bytes
    body: bytes
    timeout_s: float | None
    encoding: bytes


@dataclass(frozen=True, slots=True)
class Answered:
    """The server answered a released request. `body` is empty unless it carried a message."""

    stream: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The call ended before the server answered: cancelled, reset or overtaken by an error."""

    stream: int


Event = RequestHeld | Answered | Abandoned

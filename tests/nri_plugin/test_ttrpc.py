"""ttRPC: the worked bytes, the stream rules, sizes and errors of both sides."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nri_plugin.mux import PLUGIN_SERVICE, RUNTIME_SERVICE, frame_message
from nri_plugin.ttrpc import (
    MAX_RECEIVED_BYTES,
    MAX_SENT_BYTES,
    Call,
    Client,
    Code,
    Message,
    MessageReader,
    ProtocolError,
    Rejection,
    RpcError,
    Server,
    encode_failure,
    encode_response,
)
from protos.nri.v1alpha1.nri_pb2 import (
    ConfigureRequest,
    ConfigureResponse,
    ContainerUpdate,
    LinuxContainerUpdate,
    LinuxCPU,
    LinuxResources,
    OptionalInt64,
    RegisterPluginRequest,
    SynchronizeResponse,
)
from protos.ttrpc.ttrpc_pb2 import Request
from tests.nri_plugin import worked_bytes

PLUGIN = "nri.pkg.api.v1alpha1.Plugin"
RUNTIME = "nri.pkg.api.v1alpha1.Runtime"


def message(stream: int, kind: int, body: bytes, flags: int = 0) -> bytes:
    return struct.pack(">IIBB", len(body), stream, kind, flags) + body


def request(stream: int, *, timeout_nano: int = 0) -> bytes:
    body = Request(service=PLUGIN, method="M", payload=b"p", timeout_nano=timeout_nano)
    return message(stream, 1, body.SerializeToString())


class TestWorkedBytes:
    def test_a_registration_is_these_bytes(self) -> None:
        payload = RegisterPluginRequest(plugin_name="koordlet_nri", plugin_idx="00")
        assert payload.SerializeToString() == worked_bytes.REGISTER_REQUEST
        stream, sent = Client().call(
            RUNTIME, "RegisterPlugin", payload.SerializeToString(), timeout_ns=5_000_000_000
        )
        assert stream == 1
        assert frame_message(RUNTIME_SERVICE, sent) == worked_bytes.REGISTER_FRAME

    def test_an_empty_body_is_success(self) -> None:
        client = Client()
        stream, _ = client.call(RUNTIME, "RegisterPlugin", b"")
        (reply,) = client.receive(worked_bytes.REGISTER_REPLY_FRAME[8:])
        assert (reply.stream, reply.payload, reply.error) == (stream, b"", None)

    def test_configure_is_read(self) -> None:
        (call,) = Server().receive(worked_bytes.CONFIGURE_FRAME[8:])
        assert isinstance(call, Call)
        assert (call.stream, call.service, call.method) == (1, PLUGIN, "Configure")
        assert call.timeout_ns == 2_000_000_000
        configure = ConfigureRequest.FromString(call.payload)
        assert (configure.runtime_name, configure.runtime_version) == ("containerd", "v1.7.22")

    def test_the_reply_to_configure(self) -> None:
        payload = ConfigureResponse(events=0x8D).SerializeToString()
        framed = frame_message(PLUGIN_SERVICE, encode_response(1, payload))
        assert framed == worked_bytes.CONFIGURE_REPLY_FRAME

    def test_a_refused_method_is_these_bytes(self) -> None:
        sent = encode_failure(5, Code.UNIMPLEMENTED, "method RunPodSandbox")
        assert frame_message(PLUGIN_SERVICE, sent) == worked_bytes.UNIMPLEMENTED_FRAME

    def test_a_container_update_is_these_bytes(self) -> None:
        update = ContainerUpdate(
            container_id="abc123",
            linux=LinuxContainerUpdate(
                resources=LinuxResources(cpu=LinuxCPU(cpus="0-3", quota=OptionalInt64(value=-1)))
            ),
        )
        assert ContainerUpdate.FromString(worked_bytes.CONTAINER_UPDATE) == update
        assert len(update.SerializeToString()) == 32

    def test_a_slice_of_a_synchronization_is_these_bytes(self) -> None:
        assert SynchronizeResponse(more=True).SerializeToString() == b"\x10\x01"


class TestServer:
    @pytest.mark.parametrize(
        ("streams", "text"),
        [
            ([2], "StreamID must be odd for client initiated streams"),
            ([0], "StreamID must be odd for client initiated streams"),
            ([3, 3], "StreamID cannot be re-used and must increment"),
            ([5, 3], "StreamID cannot be re-used and must increment"),
        ],
    )
    def test_a_wrong_stream_id_is_answered_and_the_connection_goes_on(
        self, streams: list[int], text: str
    ) -> None:
        server = Server()
        events = server.receive(b"".join(request(stream) for stream in streams))
        assert events[-1] == Rejection(streams[-1], Code.INVALID_ARGUMENT, text)
        assert isinstance(server.receive(request(99))[0], Call)

    def test_an_envelope_that_does_not_parse_is_answered(self) -> None:
        (event,) = Server().receive(message(1, 1, b"\xff\xff\xff"))
        assert isinstance(event, Rejection)
        assert event.code == Code.INVALID_ARGUMENT
        assert event.message.startswith("unmarshal request error")

    def test_unknown_message_types_are_ignored(self) -> None:
        assert Server().receive(message(1, 9, b"x") + message(1, 2, b"")) == []

    def test_data_on_a_stream_that_is_not_open_is_answered(self) -> None:
        (event,) = Server().receive(message(1, 3, b"x"))
        assert event == Rejection(1, Code.INVALID_ARGUMENT, "StreamID is no longer active")

    def test_a_streaming_request_is_not_implemented(self) -> None:
        (event,) = Server().receive(message(1, 1, b"", flags=2))
        assert isinstance(event, Rejection)
        assert event.code == Code.UNIMPLEMENTED

    def test_an_oversized_request_is_refused_and_skipped_without_being_gathered(self) -> None:
        server = Server(max_bytes=100)
        oversized = message(1, 1, bytes(101))
        (event,) = server.receive(oversized[:10])
        assert isinstance(event, Rejection)
        assert event.code == Code.RESOURCE_EXHAUSTED
        assert server.receive(oversized[10:60]) == []
        (call,) = server.receive(oversized[60:] + request(3))
        assert isinstance(call, Call)
        assert call.stream == 3

    def test_requests_far_above_4_mib_are_taken(self) -> None:
        payload = bytes(10 << 20)
        body = Request(service=PLUGIN, method="Synchronize", payload=payload).SerializeToString()
        assert MAX_RECEIVED_BYTES >= 64 << 20
        (call,) = Server().receive(message(1, 1, body))
        assert isinstance(call, Call)
        assert len(call.payload) == 10 << 20

    def test_metadata_is_ignored(self) -> None:
        body = Request(service=PLUGIN, method="M")
        body.metadata.add(key="traceparent", value="00-ab-cd-01")
        body.metadata.add(key="traceparent", value="again")
        (call,) = Server().receive(message(1, 1, body.SerializeToString()))
        assert isinstance(call, Call)
        assert call.method == "M"

    def test_a_reply_that_no_peer_would_take_is_refused_here(self) -> None:
        encode_response(1, bytes(MAX_SENT_BYTES - 5))
        with pytest.raises(RpcError, match="RESOURCE_EXHAUSTED"):
            encode_response(1, bytes(MAX_SENT_BYTES))


class TestClient:
    def test_streams_are_odd_and_grow(self) -> None:
        client = Client()
        assert [client.call(RUNTIME, "M", b"")[0] for _ in range(3)] == [1, 3, 5]

    def test_replies_may_come_in_any_order(self) -> None:
        client = Client()
        first, second = (client.call(RUNTIME, "M", b"")[0] for _ in range(2))
        replies = client.receive(encode_response(second, b"b") + encode_response(first, b"a"))
        assert [(reply.stream, reply.payload) for reply in replies] == [
            (second, b"b"),
            (first, b"a"),
        ]

    def test_a_status_becomes_an_error(self) -> None:
        client = Client()
        stream, _ = client.call(RUNTIME, "M", b"")
        (reply,) = client.receive(encode_failure(stream, 77, "odd"))
        assert reply.error is not None
        assert (reply.error.code, reply.error.message) == (77, "odd")

    def test_replies_on_unknown_and_forgotten_streams_are_skipped(self) -> None:
        client = Client()
        stream, _ = client.call(RUNTIME, "M", b"")
        client.forget(stream)
        assert client.receive(encode_response(stream, b"late") + encode_response(9, b"")) == []

    def test_data_in_answer_to_a_unary_call_is_a_protocol_error(self) -> None:
        client = Client()
        stream, _ = client.call(RUNTIME, "M", b"")
        with pytest.raises(ProtocolError, match="data message"):
            client.receive(message(stream, 3, b"x"))

    def test_a_response_that_does_not_parse_is_a_protocol_error(self) -> None:
        client = Client()
        stream, _ = client.call(RUNTIME, "M", b"")
        with pytest.raises(ProtocolError, match="cannot be read"):
            client.receive(message(stream, 2, b"\xff\xff"))

    def test_an_oversized_request_leaves_the_connection_usable(self) -> None:
        client = Client()
        with pytest.raises(RpcError, match="RESOURCE_EXHAUSTED"):
            client.call(RUNTIME, "M", bytes(MAX_SENT_BYTES))
        assert client.call(RUNTIME, "M", b"")[0] == 1


messages = st.builds(
    Message,
    stream=st.integers(0, 2**32 - 1),
    type=st.integers(0, 255),
    flags=st.integers(0, 255),
    body=st.binary(max_size=60),
)


@given(sent=st.lists(messages, max_size=10), data=st.data())
def test_any_cut_of_the_stream_gives_the_same_messages(
    sent: list[Message], data: st.DataObject
) -> None:
    stream = b"".join(message(m.stream, m.type, m.body, m.flags) for m in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    reader = MessageReader()
    received: list[object] = []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += reader.feed(stream[start:stop])
    assert received == sent


@given(pieces=st.lists(st.binary(max_size=200), max_size=20))
def test_no_bytes_make_a_server_raise(pieces: list[bytes]) -> None:
    server = Server(max_bytes=1000)
    for piece in pieces:
        for event in server.receive(piece):
            assert isinstance(event, Call | Rejection)

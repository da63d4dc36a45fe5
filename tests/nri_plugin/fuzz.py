"""Byte-level fuzzing of the mux, ttRPC, the NRI decoder and the mapping behind it.

    python -m tests.nri_plugin.fuzz --seconds 600

One case is one seed: a trunk of valid and random messages, cut, mutated and fed in pieces to a real
connection with a real session behind it. What must hold is stated in `run_case`. A failure prints
the seed; `--seed N` plays it again. The suite runs a few hundred seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from apis.cpuset import CpuSet
from hooks.decision import Decision
from hooks.observed import Container
from hooks.subject import Requested
from linux.resources import DeviceNode, Mount, Resource, Value
from nri_plugin import replies
from nri_plugin.capabilities import runtime_profile
from nri_plugin.connection import Connection
from nri_plugin.options import Options
from nri_plugin.session import PLUGIN, Inventory, Session
from nri_plugin.statistics import Statistics
from nri_plugin.subjects import values
from protos.nri.v1alpha1 import nri_pb2 as nri
from protos.ttrpc import ttrpc_pb2 as ttrpc
from tests.nri_plugin.scenes import RecordingHandler, Values, decision

REQUESTS: dict[str, type[Message]] = {
    "Configure": nri.ConfigureRequest,
    "Synchronize": nri.SynchronizeRequest,
    "Shutdown": nri.Empty,
    "RunPodSandbox": nri.RunPodSandboxRequest,
    "UpdatePodSandbox": nri.UpdatePodSandboxRequest,
    "PostUpdatePodSandbox": nri.PostUpdatePodSandboxRequest,
    "StopPodSandbox": nri.StopPodSandboxRequest,
    "RemovePodSandbox": nri.RemovePodSandboxRequest,
    "CreateContainer": nri.CreateContainerRequest,
    "PostCreateContainer": nri.PostCreateContainerRequest,
    "StartContainer": nri.StartContainerRequest,
    "PostStartContainer": nri.PostStartContainerRequest,
    "UpdateContainer": nri.UpdateContainerRequest,
    "PostUpdateContainer": nri.PostUpdateContainerRequest,
    "StopContainer": nri.StopContainerRequest,
    "RemoveContainer": nri.RemoveContainerRequest,
    "StateChange": nri.StateChangeEvent,
    "ValidateContainerAdjustment": nri.ValidateContainerAdjustmentRequest,
}

_TEXTS = (
    "",
    "a",
    "-a",
    "A=1",
    "=",
    "0-3",
    "0,2",
    "9999",
    "/kubepods/burstable/pod1",
    "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podx.slice",
    "x.slice:cri-containerd:c",
    "../../etc",
    "containerd",
    "v2.1.0",
    "v1.7.20-k3s1",
    "events: all",
    "{events: [",
    "\u0660\u0661",
    "\u2028",
    "x" * 5000,
)
_NUMBERS = (0, 1, 2, 99, -1, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63), 2**64 - 1, 2**32 - 1)
_LIMITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


class Broken(AssertionError):
    """An invariant does not hold."""


class FakeTransport(asyncio.Transport):
    """Keeps what is written; a closed one takes nothing more."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.ended = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.ended:
            self.written += data

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def close(self) -> None:
        self.ended = True

    def abort(self) -> None:
        self.ended = True


def any_message(chance: random.Random, kind: type[Message], depth: int = 0) -> Message:
    """A message with some of its fields set to likely and unlikely values."""
    message = kind()
    for field in message.DESCRIPTOR.fields:
        if chance.random() < 0.5:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entries = getattr(message, field.name)
            value_field = field.message_type.fields_by_name["value"]
            if value_field.message_type is None:
                for _ in range(chance.randrange(3)):
                    key = _scalar(chance, field.message_type.fields_by_name["key"])
                    entries[key] = _scalar(chance, value_field)
            continue
        if field.message_type is not None:
            if depth > 6:
                continue
            inner = getattr(sys.modules[nri.__name__], field.message_type.name)
            if field.is_repeated:
                for _ in range(chance.randrange(3)):
                    getattr(message, field.name).append(any_message(chance, inner, depth + 1))
            else:
                getattr(message, field.name).CopyFrom(any_message(chance, inner, depth + 1))
            continue
        if field.is_repeated:
            values = [_scalar(chance, field) for _ in range(chance.randrange(4))]
            getattr(message, field.name).extend(values)
        else:
            setattr(message, field.name, _scalar(chance, field))
    return message


def _scalar(chance: random.Random, field: Any) -> object:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return chance.choice(_TEXTS)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return chance.random() < 0.5
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return chance.choice((0, 1, 2, 4, 99))
    low, high = _LIMITS[field.cpp_type]
    return min(max(chance.choice(_NUMBERS), low), high)


def any_values(chance: random.Random) -> Values:
    """What a policy may decide, and what only a defective one would."""
    pool: tuple[Value, ...] = (
        -1,
        0,
        2,
        100000,
        2**63,
        -5,
        "text",
        "\udc80",
        CpuSet.parse("0-3"),
        CpuSet(),
        Mount(destination="/x", type="bind", source="/y", options=("ro",)),
        DeviceNode(path="/dev/x", type="c", major=1, minor=2, file_mode=0o666),
    )
    keys = ("", "A", "-A", "/x", "/dev/x", "a=b")
    return {
        (chance.choice(list(Resource)), chance.choice(keys)): chance.choice(pool)
        for _ in range(chance.randrange(8))
    }


class FuzzedHandler(RecordingHandler):
    """Decides at random, and checks what it is given."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance

    def _check(self, container: Container) -> None:
        for cgroup in (container.subject.cgroup, container.subject.pod.cgroup):
            if cgroup.startswith("/") or ".." in cgroup.split("/"):
                raise Broken(f"a cgroup path that leads elsewhere: {cgroup!r}")

    def create_container(self, container: Container) -> Decision | None:
        self._check(container)
        return decision(any_values(self._chance))

    def update_container(self, container: Container) -> Decision | None:
        self._check(container)
        return decision(any_values(self._chance))


def run_case(seed: int) -> None:
    """Play one seed. Raises Broken, or whatever escapes, when something does not hold.

    - No bytes make the connection raise.
    - What it writes is whole frames of whole ttRPC messages, and every payload parses.
    - A mask is never zero, never has the validator's bit, never a bit that the runtime lacks.
    - Only a handler's defect counts as one: the broken values of this one's decisions do not.
    - Deciding the same again on an adjusted container changes nothing.
    """
    chance = random.Random(seed)
    statistics = Statistics()
    session = Session(
        handler=FuzzedHandler(chance),
        options=Options(run_dir="/nonexistent", cgroup_version=chance.choice((1, 2))),
        statistics=statistics,
        inventory=Inventory(),
        entered=lambda state: None,
        broken=lambda reason: None,
    )
    connection = Connection(session.serve)
    transport = FakeTransport()
    connection.connection_made(transport)
    trunk, asked = _any_trunk(chance)
    for piece in _pieces(chance, trunk):
        connection.data_received(piece)
    _check_written(bytes(transport.written), asked)
    if statistics.handler_faults:
        raise Broken("a valid message, or a wrong value, counts as the handler's defect")
    _check_idempotence(chance)


def _any_trunk(chance: random.Random) -> tuple[bytes, dict[int, str]]:
    """A trunk's bytes, and the methods asked on each stream where that is certain."""
    trunk = bytearray()
    asked: dict[int, str] = {}
    mutate = chance.random() < 0.6
    stream = 1
    for _ in range(chance.randrange(1, 6)):
        method = chance.choice(list(REQUESTS))
        payload = any_message(chance, REQUESTS[method]).SerializeToString()
        if mutate and chance.random() < 0.5:
            payload = _mutated(chance, payload)
        body = ttrpc.Request(
            service=PLUGIN if chance.random() < 0.95 else "other",
            method=method if chance.random() < 0.95 else chance.choice(_TEXTS),
            payload=payload,
            timeout_nano=chance.choice((0, 1, -1, 2_000_000_000, 2**63 - 1)),
        ).SerializeToString()
        kind = 1 if chance.random() < 0.95 else chance.randrange(256)
        message = struct.pack(">IIBB", len(body), stream, kind, 0) + body
        if kind == 1:
            asked.setdefault(stream, method)
        stream += chance.choice((2, 2, 2, 2, 1, 0, 4))
        at = 0
        while at < len(message):
            size = chance.choice((1, 10, 4096, len(message)))
            part = message[at : at + size]
            identifier = chance.randrange(5) if mutate and chance.random() < 0.02 else 1
            trunk += struct.pack(">II", identifier, len(part)) + part
            at += size
    if mutate and chance.random() < 0.7:
        return _mutated(chance, bytes(trunk)), {}
    return bytes(trunk), {} if mutate else asked


def _mutated(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randrange(1, 5)):
        what = chance.randrange(4)
        at = chance.randrange(len(changed) + 1)
        if what == 0 and at < len(changed):
            changed[at] ^= 1 << chance.randrange(8)
        elif what == 1:
            changed[at:at] = chance.randbytes(chance.randrange(20))
        elif what == 2:
            del changed[at : at + chance.randrange(20)]
        else:
            changed[at : at + 4] = chance.choice((b"\0\0\0\0", b"\xff" * 4, b"\x7f\xff\xff\xff"))
    return bytes(changed)


def _pieces(chance: random.Random, data: bytes) -> list[bytes]:
    if chance.random() < 0.3:
        return [data]
    pieces, at = [], 0
    while at < len(data):
        size = chance.choice((1, 3, 8, 100, 5000))
        pieces.append(data[at : at + size])
        at += size
    return pieces


def _check_written(written: bytes, asked: dict[int, str]) -> None:
    streams = {1: b"", 2: b""}
    at = 0
    while at < len(written):
        identifier, length = struct.unpack_from(">II", written, at)
        streams[identifier] += written[at + 8 : at + 8 + length]
        at += 8 + length
    if at != len(written) or streams[2]:
        raise Broken("a frame is cut, or answers a call that nobody made")
    replies_stream = streams[1]
    while replies_stream:
        length, stream, kind, flags = struct.unpack_from(">IIBB", replies_stream)
        body, replies_stream = replies_stream[10 : 10 + length], replies_stream[10 + length :]
        if (kind, flags) != (2, 0) or len(body) != length:
            raise Broken("not a whole response")
        response = ttrpc.Response.FromString(body)
        if response.status.code or stream not in asked:
            continue
        _check_reply(asked[stream], response.payload)


def _check_reply(method: str, payload: bytes) -> None:
    name = {"Shutdown": "Empty", "StateChange": "Empty"}.get(method, f"{method}Response")
    reply = getattr(nri, name).FromString(payload)
    if isinstance(reply, nri.ConfigureResponse) and (
        reply.events == 0 or reply.events & 0x2000 or reply.events >> 14
    ):
        raise Broken(f"a mask of {reply.events:#x}")
    if isinstance(reply, nri.CreateContainerResponse):
        keys = [entry.key for entry in reply.adjust.env]
        if len(keys) != len(set(keys)) or any(key.startswith("-") for key in keys):
            raise Broken(f"environment twice, or removed: {keys}")
    if isinstance(reply, nri.UpdateContainerResponse) and any(
        not update.container_id for update in reply.update
    ):
        raise Broken("an update without a container")


def _check_idempotence(chance: random.Random) -> None:
    profile = runtime_profile("containerd", "v2.2.1", cgroup_version=2)
    container = cast(nri.Container, any_message(chance, nri.Container))
    wanted = decision(any_values(chance))
    first = replies.adjustment(container, _requested(container), wanted, profile, {"text"})
    if first.message is None:
        return
    adjust = first.message
    container.linux.resources.MergeFrom(adjust.linux.resources)
    if adjust.linux.HasField("oom_score_adj"):
        container.linux.oom_score_adj.CopyFrom(adjust.linux.oom_score_adj)
    container.mounts.extend(adjust.mounts)
    container.linux.devices.extend(adjust.linux.devices)
    container.env.extend(f"{entry.key}={entry.value}" for entry in adjust.env)
    again = replies.adjustment(container, _requested(container), wanted, profile, {"text"})
    if again.message is not None:
        raise Broken(f"a second instance would claim again: {again.message}")


def _requested(container: nri.Container) -> Requested:
    return values(container.linux.resources, container.linux.oom_score_adj.value)


def run_seeds(first: int, going_on: Callable[[int], bool]) -> int:
    """Play seeds from `first` while `going_on(number played)`; return how many were played."""
    logging.disable(logging.CRITICAL)
    played = 0

    async def play() -> None:
        nonlocal played
        while going_on(played):
            try:
                run_case(first + played)
            except BaseException:
                print(f"seed {first + played} fails", file=sys.stderr)
                raise
            played += 1

    try:
        asyncio.run(play())
    finally:
        logging.disable(logging.NOTSET)
    return played


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, help="play this one seed and stop")
    parser.add_argument("--first", type=int, default=time.time_ns() % 10**9)
    options = parser.parse_args()
    if options.seed is not None:
        run_seeds(options.seed, lambda played: played < 1)
        print(f"seed {options.seed} holds")
        return
    until = time.monotonic() + options.seconds
    played = run_seeds(options.first, lambda played: time.monotonic() < until)
    print(f"{played} cases from seed {options.first}: nothing found")


if __name__ == "__main__":
    main()

"""Writes what the strategies see into a ring of files. Belongs to the sampling thread.

Off by default. Of pods it keeps what strategies read: names, QoS, priority, requests, and labels
and annotations of Koordinator's domain; other labels and annotations are left out. The disk never
stops a round: an error is kept in `problem`, and writing goes on with a new file.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Mapping
from typing import Final, Protocol, cast

import msgspec
import numpy as np

from hooks.facts import NodeInputs
from koordlet.measurement.series import Metric
from koordlet.qos.recording import frames
from koordlet.qos.strategy import PodOnNode, Situation

_LOG = logging.getLogger("koordlet.recording")

_NAME: Final = re.compile(r"recording-(\d{8})\.koordlet")
_FILES: Final = 8
"""Files of the ring. Chosen: the oldest eighth goes at a time."""
_DOMAIN: Final = "koordinator.sh/"

METRICS: Final = (
    Metric.NODE_CPU,
    Metric.NODE_MEMORY,
    Metric.BE_CPU_USED,
    Metric.BE_CPU_LIMIT,
    Metric.BE_CPU_REQUEST,
    Metric.POD_CPU,
    Metric.POD_CPU_THROTTLED,
    Metric.POD_MEMORY,
    Metric.POD_MEMORY_WITH_PAGE_CACHE,
    Metric.POD_PSI,
    Metric.CONTAINER_CPU,
    Metric.CONTAINER_CPU_THROTTLED,
    Metric.HOST_APP_CPU,
    Metric.RESCTRL_BANDWIDTH,
)
"""Those that strategies read; a replay without one of them would decide otherwise."""
_THIS_ROUND_S: Final = 1e-6
"""Samples of this round have its moment itself."""

Key = tuple[str, str, str]


class Readable(Protocol):
    """The measurements of one round."""

    def latest_of(self, metric: Metric, *, within_s: float) -> Mapping[tuple[str, str], float]: ...


class Recorder:
    """See the module. most_bytes: of all files together."""

    def __init__(self, directory: str, *, most_bytes: int) -> None:
        self._directory = directory
        self._file_bytes = max(most_bytes // _FILES, 1 << 16)
        self._descriptor = -1
        self._size = 0
        self._started = False
        """Whether the start of this daemon is in the recording."""
        self._written: dict[str, object] = {}
        """What the present file has last, by the kind of its frame."""
        self.problem = ""
        """Why the last round was not written; "" when it was."""

    def round(self, situation: Situation) -> None:
        """Write one round, of which the measurements can be read metric by metric. Never raises
        OSError."""
        try:
            if self._descriptor < 0 or self._size >= self._file_bytes:
                self._next_file()
            self._write(self._changed(situation) + self._round(situation))
        except OSError as error:
            problem = f"{self._directory}: {error.strerror or error}"
            if problem != self.problem:
                _LOG.warning("the recording cannot be written: %s; it is tried again", problem)
            self.problem = problem
            self.close()
        else:
            self._started = True
            self.problem = ""

    def close(self) -> None:
        """Close the present file; a later round begins another one."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _changed(self, situation: Situation) -> bytes:
        """Return the frames of what is another object than in the last round."""
        parts: list[bytes] = []
        if self._written.get("inputs") is not situation.inputs:
            self._written["inputs"] = situation.inputs
            parts.append(frames.pack(frames.Inputs(_without_private_words(situation.inputs))))
        if (
            self._written.get("pods") is not situation.pods
            or self._written.get("apps") is not situation.host_apps
        ):
            self._written["pods"], self._written["apps"] = situation.pods, situation.host_apps
            pods = tuple(map(_without_private_parts, situation.pods))
            parts.append(frames.pack(frames.Pods(pods, situation.host_apps)))
        if self._written.get("node") != situation.node:
            self._written["node"] = situation.node
            parts.append(frames.pack(frames.Amounts(situation.node, situation.interval_s)))
        return b"".join(parts)

    def _round(self, situation: Situation) -> bytes:
        measured = cast(Readable, situation.measurements)
        values: dict[Key, float] = {}
        for metric in METRICS:
            for (of, detail), value in measured.latest_of(metric, within_s=_THIS_ROUND_S).items():
                values[metric.value, of, detail] = value
        names = tuple(values)
        before = b""
        if self._written.get("names") != names:
            self._written["names"] = names
            before = frames.pack(frames.Names(names))
        numbers = np.fromiter(values.values(), dtype="<f8", count=len(values))
        return before + frames.pack(frames.Round(situation.now, situation.wall, numbers.tobytes()))

    def _write(self, data: bytes) -> None:
        written = os.write(self._descriptor, data)
        self._size += written
        if written < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _next_file(self) -> None:
        self.close()
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        numbers = sorted(files(self._directory))
        for number in numbers[: max(len(numbers) - _FILES + 1, 0)]:
            os.unlink(f"{self._directory}/{name(number)}")
        path = f"{self._directory}/{name(numbers[-1] + 1 if numbers else 1)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(path, flags, 0o600)
        self._size = 0
        self._written = {}
        self._write(frames.HEADER if self._started else frames.HEADER + frames.pack(frames.Start()))


def name(number: int) -> str:
    """Return the name of a file of the ring."""
    return f"recording-{number:08d}.koordlet"


def files(directory: str) -> list[int]:
    """Return the numbers of the ring's files. Raises OSError."""
    return [int(found[1]) for each in os.listdir(directory) if (found := _NAME.fullmatch(each))]


def _without_private_parts(pod: PodOnNode) -> PodOnNode:
    """Return the pod without labels and annotations outside of Koordinator's domain."""
    kept = msgspec.structs.replace(
        pod.pod, labels=_ours(pod.pod.labels), annotations=_ours(pod.pod.annotations)
    )
    containers = tuple(msgspec.structs.replace(each, pod=kept) for each in pod.containers)
    return msgspec.structs.replace(pod, pod=kept, containers=containers)


def _without_private_words(inputs: NodeInputs) -> NodeInputs:
    """Return the inputs with the Node's labels and annotations of Koordinator's domain alone, and
    without the names of pods' volumes, which no strategy reads."""
    node = msgspec.structs.replace(
        inputs.node, labels=_ours(inputs.node.labels), annotations=_ours(inputs.node.annotations)
    )
    kernel = msgspec.structs.replace(inputs.kernel, pod_volumes={})
    return msgspec.structs.replace(inputs, node=node, kernel=kernel)


def _ours(words: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in words.items() if _DOMAIN in key}

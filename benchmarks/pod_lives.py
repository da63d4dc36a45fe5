"""Pods that a runtime starts, updates and ends, with real cgroups, and what each call took.

One life, in the order in which kubelet and containerd go through it: kubelet makes the pod's group;
RunPodSandbox; the sandbox's group; CreateContainer; the container's group, with the values that the
plugin answered; PostStartContainer; for every fifth container UpdateContainer, its values and
PostUpdateContainer; and then the oldest pod ends: StopContainer, the group goes, RemoveContainer,
StopPodSandbox, the groups go, RemovePodSandbox.

The groups hold no processes. One request is under way at a time, as under containerd's NRI lock.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.nri_driver import Driver
from benchmarks.nri_messages import container, pod
from protos.nri.v1alpha1 import nri_pb2 as nri
from tests.beds.groups import Kubepods

GAP_MS: Final = 5.0
"""Measured on the test bed of containerd 2.1, with nothing between its CRI and the caller: 25 pods,
4.3 to 7.5 ms, 5.8 at the median; on 1.7 it was 11.7 to 16.5 ms. A kubelet takes longer. With 0 the
container comes while koordlet writes its pod's values, as no runtime does with a single pod."""

_UPDATED_EVERY: Final = 5
"""In-place resizes are rarer on most nodes; one in five keeps that path in the figures."""

_LOOK_AGAIN_S: Final = 0.0001
_VALUE_PATIENCE_S: Final = 5.0


class _Pod(NamedTuple):
    message: nri.PodSandbox
    container: nri.Container
    groups: tuple[str, ...]
    """Children first."""


class Lives:
    """The pods of one plugin. `alive` of them run at a time; `seconds` has each call's durations.

    first: the number of the first pod; numbers make names, ids and annotations.
    gap_s: from the reply to RunPodSandbox to CreateContainer; 0 is sooner than any runtime calls.
    """

    def __init__(
        self,
        driver: Driver,
        groups: Kubepods,
        *,
        alive: int,
        first: int = 0,
        gap_s: float = 0.0,
    ) -> None:
        self._driver = driver
        self._groups = groups
        self._alive = alive
        self._number = first
        self._gap_s = gap_s
        self._pods: deque[_Pod] = deque()
        self.adjusted = 0
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    def fill(self) -> None:
        """Start pods until as many run as shall; nothing of it counts."""
        while len(self._pods) < self._alive:
            self._start()
        self.seconds.clear()
        self.adjusted = 0

    def run(self, count: int, *, pause_s: float = 0.0) -> None:
        """Start `count` pods, and end one for each. pause_s: between two lives."""
        for _ in range(count):
            self._start()
            self._end()
            if pause_s:
                time.sleep(pause_s)

    def pod_value_delay(self) -> float:
        """Start a pod, end one; return the seconds from the reply to RunPodSandbox until the pod's
        own group had its CFS quota. Infinite when it had none after a while."""
        message, group = self._make_pod()
        quota = self._groups.file(group, "cpu.cfs_quota_us")
        kubelets = quota.read_text()
        self._send(nri.RUN_POD_SANDBOX, message, None)
        delay = _changed_after(quota, kubelets)
        self._go_on(message)
        self._end()
        return delay

    def _start(self) -> None:
        message, _ = self._make_pod()
        self._send(nri.RUN_POD_SANDBOX, message, None)
        if self._gap_s:
            time.sleep(self._gap_s)
        self._go_on(message)

    def _make_pod(self) -> tuple[nri.PodSandbox, str]:
        message = pod(self._number, self._groups.pod_path("{uid}", "besteffort"))
        self._number += 1
        return message, self._groups.make_pod(message.uid, "besteffort", cpu_shares=2)

    def _go_on(self, message: nri.PodSandbox) -> None:
        """From the sandbox to the running container."""
        groups = self._groups
        group = message.linux.cgroup_parent
        sandbox_group = f"{group}/{message.id}"
        groups.make(sandbox_group)
        created = container(int(message.id, 16), message)
        container_group = created.linux.cgroups_path
        request = nri.CreateContainerRequest(pod=message, container=created)
        reply = self._call("CreateContainer", request.SerializeToString())
        adjust = nri.CreateContainerResponse.FromString(reply).adjust
        self.adjusted += adjust.ByteSize() > 0
        groups.make(container_group)
        self._set(container_group, adjust.linux.resources)
        created.linux.resources.MergeFrom(adjust.linux.resources)
        created.state = nri.CONTAINER_RUNNING
        self._send(nri.POST_START_CONTAINER, message, created)
        if self._number % _UPDATED_EVERY == 0:
            self._update(message, created)
        self._pods.append(_Pod(message, created, (container_group, sandbox_group, group)))

    def _update(self, message: nri.PodSandbox, created: nri.Container) -> None:
        """kubelet asks for the shares again, as it does for a container without requests."""
        asked = nri.LinuxResources()
        asked.cpu.shares.value = 2
        request = nri.UpdateContainerRequest(pod=message, container=created, linux_resources=asked)
        reply = self._call("UpdateContainer", request.SerializeToString())
        for update in nri.UpdateContainerResponse.FromString(reply).update:
            asked.MergeFrom(update.linux.resources)
        self._set(created.linux.cgroups_path, asked)
        created.linux.resources.MergeFrom(asked)
        self._send(nri.POST_UPDATE_CONTAINER, message, created)

    def _end(self) -> None:
        ended = self._pods.popleft()
        container_group, sandbox_group, group = ended.groups
        ended.container.state = nri.CONTAINER_STOPPED
        request = nri.StopContainerRequest(pod=ended.message, container=ended.container)
        self._call("StopContainer", request.SerializeToString())
        self._groups.remove(container_group)
        self._send(nri.REMOVE_CONTAINER, ended.message, ended.container)
        self._send(nri.STOP_POD_SANDBOX, ended.message, None)
        self._groups.remove(sandbox_group)
        self._groups.remove(group)
        self._send(nri.REMOVE_POD_SANDBOX, ended.message, None)

    def _call(self, method: str, payload: bytes) -> bytes:
        reply, took = self._driver.call(method, payload)
        self.seconds[method].append(took)
        return reply

    def _send(self, event: nri.Event, message: nri.PodSandbox, about: nri.Container | None) -> None:
        took = self._driver.tell(event, message, about)
        if took is not None:
            self.seconds[nri.Event.Name(event)].append(took)

    def _set(self, group: str, resources: nri.LinuxResources) -> None:
        """Write what a runtime writes into a container's group; 0 is not asked for."""
        cpu = resources.cpu
        for resource, value in (
            ("cpu.shares", self._groups.weight(cpu.shares.value) if cpu.shares.value else 0),
            ("cpu.cfs_quota_us", cpu.quota.value),
            ("memory.limit_in_bytes", resources.memory.limit.value),
        ):
            if value > 0:
                self._groups.file(group, resource).write_text(str(value))


def _changed_after(file: Path, text: str) -> float:
    """Return the seconds until `file` reads otherwise than `text`; infinite when it never does."""
    began = time.perf_counter()
    while (waited := time.perf_counter() - began) < _VALUE_PATIENCE_S:
        with contextlib.suppress(FileNotFoundError):
            if file.read_text() != text:
                return waited
        time.sleep(_LOOK_AGAIN_S)
    return float("inf")

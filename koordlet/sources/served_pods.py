"""The API server as a source of this node's pods, for nodes whose kubelet is not to be asked.

One watch, selected by `spec.nodeName`. Off by default: RBAC cannot limit the right to it to the
pods of one node (docs/compatibility.md, "Sources of pods"). While the server does not answer, the
last list stays. It is not kept over a restart: specifications hold what the environment of
containers holds, and the runtime reports the pods meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from apis.core import ObjectMeta, Pod
from apis.decode import decode_object
from apis.errors import printable
from koordlet.state.podspec import KnownPod, known_pod
from kube.cache import Cache
from kube.client import Client
from kube.resources import PODS

_GATHER_S: Final = 0.1
"""Chosen: changes within this time are taken together, as the status of a pod that starts changes
several times. Twice the value makes what only the server knows take effect that much later."""
_RBAC: Final = "deploy/koordlet/rbac-pods.yaml"


class _Named(msgspec.Struct, frozen=True):
    name: str = ""
    namespace: str = ""


class _Bare(msgspec.Struct, frozen=True):
    metadata: _Named = _Named()


class _Served(msgspec.Struct, frozen=True):
    """A pod, with the metadata that a cache needs."""

    metadata: ObjectMeta
    known: KnownPod


class ServedPods:
    """Belongs to the event loop.

    changed: called with the whole list, first when it has arrived, then when it has changed.
    bad_pod: called with (object, problem) for a pod that cannot be read; its last good version
    stays.
    """

    def __init__(
        self,
        node_name: str,
        *,
        changed: Callable[[Sequence[KnownPod]], None],
        bad_pod: Callable[[str, str], None],
    ) -> None:
        self._node_name = node_name
        self._changed = changed
        self._bad_pod = bad_pod
        self.cache: Cache[_Served] | None = None
        """Of the present connection; None before the first."""

    @property
    def problem(self) -> str:
        """Why the list is not followed at present; "" while it is."""
        if self.cache is None or not self.cache.problem:
            return ""
        if self.cache.forbidden_since is None:
            return self.cache.problem
        return f"{self.cache.problem}: apply {_RBAC}, or switch kubernetes.pods off"

    async def follow(self, client: Client) -> None:
        """Follow the list over one connection until cancelled."""
        cache = self.cache = Cache(
            client,
            PODS,
            _Served,
            field_selector=f"spec.nodeName={self._node_name}",
            decode=self._decoded,
        )
        change = asyncio.Event()
        cache.subscribe(lambda _: change.set())
        async with asyncio.TaskGroup() as group:
            group.create_task(cache.run())
            # A list that has arrived in part would describe another node.
            await cache.wait_synced()
            while True:
                change.clear()
                self._changed([each.known for each in cache.items.values()])
                await change.wait()
                await asyncio.sleep(_GATHER_S)

    def _decoded(self, data: bytes) -> _Served:
        """Return a pod; raises ValidationError, as the cache expects, if it cannot be read."""
        try:
            named = msgspec.json.decode(data, type=_Bare).metadata
            obj = printable(f"Pod {named.namespace}/{named.name} of the API server")
        except (msgspec.DecodeError, RecursionError):
            obj = "a Pod of the API server"
        try:
            pod = decode_object(data, Pod, obj=obj)
            meta = pod.metadata
            kept = ObjectMeta(
                name=meta.name, namespace=meta.namespace, resource_version=meta.resource_version
            )
            return _Served(kept, known_pod(pod))
        except Exception as error:
            # Also for a defect: it must cost the pod, not the list.
            self._bad_pod(obj, str(error))
            raise msgspec.ValidationError(str(error)) from error

"""Binds the claims of pods before the pods: writes, then waits until the claims are bound.

For a claim that gets a volume, the volume's reference to the claim is written; for one whose volume
is to be made, the node on the claim. Kubernetes' volume controller and the provisioners do the
rest. Nothing has to be remembered over a restart: a volume that refers to a claim is the only one
that the claim can get, and a claim with a node keeps it. What goes wrong gives the pod's node back;
what is written stays. docs/facts/scheduler.md, "Binding of volumes".
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from apis.scheduling_pod import SchedulingPod
from apis.storage import (
    ANNOTATION_BOUND_BY_CONTROLLER,
    ANNOTATION_SELECTED_NODE,
    PersistentVolume,
    PersistentVolumeClaim,
    decode_claim,
    decode_volume,
)
from cluster.scheduler.binding.pauses import MOST_FAILURES, Pauses
from cluster.scheduler.binding.placement import Placement, Refused, Why
from cluster.scheduler.binding.preparation import GivenUp, check_pod
from kube.cache import Cache, Event, object_key
from kube.client import MERGE_PATCH, ApiError, Client, Unreachable
from kube.faults import Faults
from kube.resources import PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES, Resource

_log = logging.getLogger(__name__)

T = TypeVar("T", PersistentVolume, PersistentVolumeClaim)

_AT_ONCE: Final = 8
"""Requests in parallel. Chosen: half of those of bindings, which wait for these."""
_LOOK_S: Final = 1.0
"""Between two looks at whether the pod and its node still exist; events of claims and volumes are
noticed at once. As kube-scheduler."""
_DEFAULT_TIMEOUT_S: Final = 600.0
"""kube-scheduler's bindTimeoutSeconds."""


@dataclass(slots=True)
class VolumeBindingCounts:
    """Pods since the start."""

    bound: int = 0
    refused: int = 0


class VolumeBinder:
    """Carries out what is planned for claims, and passes the placement on when they are bound.

    bind: takes placements whose claims are bound. refuse: takes those that are given up, once each.
    claims, volumes: as the API server shows them. pod_of: namespace/name -> the pod as last seen.
    reaches: whether a volume can be reached from a node, both by name; None for an unknown node.
    timeouts: how long claims may take to be bound, in seconds, by scheduler name.
    """

    def __init__(
        self,
        client: Client,
        *,
        bind: Callable[[Placement], None],
        refuse: Callable[[Placement, Refused], None],
        claims: Cache[PersistentVolumeClaim],
        volumes: Cache[PersistentVolume],
        pod_of: Callable[[str], SchedulingPod | None],
        reaches: Callable[[str, str], bool | None],
        timeouts: Mapping[str, float],
    ) -> None:
        self._client = client
        self._bind = bind
        self._refuse = refuse
        self._claims = claims
        self._volumes = volumes
        self._pod_of = pod_of
        self._reaches = reaches
        self._timeouts = timeouts
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[str, dict[str, asyncio.Event]] = {}
        """Key of a claim, or name of a volume -> UID of a pod -> set when it changed."""
        self.counts = VolumeBindingCounts()
        self.faults = Faults("binding volumes")
        claims.subscribe(self._changed)
        volumes.subscribe(self._changed)

    @property
    def in_flight(self) -> int:
        """How many pods wait for their claims."""
        return len(self._tasks)

    def submit(self, placement: Placement) -> None:
        """Bind the claims of a placement in the background."""
        task = asyncio.create_task(self._carry_out(placement))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """End all work. What was written stays; the next leader goes on from there."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _changed(self, event: Event[PersistentVolume] | Event[PersistentVolumeClaim]) -> None:
        for changed in self._waiting.get(object_key(event.new), {}).values():
            changed.set()

    async def _carry_out(self, placement: Placement) -> None:
        try:
            seconds = self._timeout_of(placement)
            written = await self._write(placement)
            async with asyncio.timeout(seconds):
                await self._wait(placement, written)
        except GivenUp as given_up:
            self._give_up(placement, given_up.refused)
        except TimeoutError:
            self._give_up(
                placement,
                Refused(
                    Why.FAILING,
                    f"binding volumes: claims are not bound after {seconds:g} s: "
                    + ", ".join(self._unbound(placement)),
                ),
            )
        except Exception as error:  # noqa: BLE001 - a defect must not leave a booking for ever
            self.faults.note("binding volumes", about=placement.key)
            text = f"binding volumes: {type(error).__name__}: {error}"
            self._give_up(placement, Refused(Why.FAILING, text))
        else:
            self.counts.bound += 1
            # While the process stops, the binder takes no more; the next leader binds the pod.
            with suppress(RuntimeError):
                self._bind(placement)

    def _give_up(self, placement: Placement, refused: Refused) -> None:
        self.counts.refused += 1
        try:
            self._refuse(placement, refused)
        except Exception:  # noqa: BLE001 - the other placements go on
            self.faults.note("taking an outcome", about=placement.key)

    def _timeout_of(self, placement: Placement) -> float:
        pod = self._pod_of(placement.key)
        name = pod.spec.scheduler_name if pod is not None else ""
        return self._timeouts.get(name, _DEFAULT_TIMEOUT_S)

    def _unbound(self, placement: Placement) -> list[str]:
        keys = (*(claim for claim, _ in placement.volumes.binds), *placement.volumes.provisions)
        return [
            key
            for key in keys
            if (claim := self._claims.items.get(key)) is None or not claim.is_bound
        ]

    # --- writing -------------------------------------------------------------------------------

    async def _write(self, placement: Placement) -> dict[str, int]:
        """Write what is planned; return the versions that were written, by claim or volume."""
        written: dict[str, int] = {}
        for key, name in placement.volumes.binds:
            claim = self._claims.items.get(key)
            if claim is None:
                raise _missing(key)
            volume = await self._patch(
                PERSISTENT_VOLUMES,
                "",
                name,
                decode_volume,
                self._volumes.items.get(name),
                lambda found, claim=claim: _reference(found, claim),  # type: ignore[misc]
                placement,
            )
            written[name] = _version(volume.metadata.resource_version)
        for key in placement.volumes.provisions:
            namespace, _, name = key.partition("/")
            made_for = await self._patch(
                PERSISTENT_VOLUME_CLAIMS,
                namespace,
                name,
                decode_claim,
                self._claims.items.get(key),
                lambda found: _selection(found, placement.node),
                placement,
            )
            written[key] = _version(made_for.metadata.resource_version)
        return written

    async def _patch(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        decode: Callable[[bytes], T],
        known: T | None,
        patch_of: Callable[[T], dict[str, object] | None],
        placement: Placement,
    ) -> T:
        """Write a patch until its effect is certain; return the object as it is then.

        patch_of: the patch that an object still needs, None if none; raises GivenUp. The version
        that the patch was made for is a precondition. After a conflict or a lost answer the object
        is read, and the patch made again.
        """
        path = resource.path(namespace=namespace, name=name)
        what = f"{resource.kind} {f'{namespace}/' if namespace else ''}{name}"
        found = known
        pauses = Pauses()
        failures = 0
        while True:
            check_pod(placement, self._pod_of(placement.key))
            try:
                if found is None:
                    found = decode(await self._request("GET", path))
                patch = patch_of(found)
                if patch is None:
                    return found
                body = msgspec.json.encode(patch)
                return decode(await self._request("PATCH", path, body))
            except ApiError as error:
                if error.not_found:
                    raise GivenUp(Why.CONFLICT, f"binding volumes: {what} not found") from None
                if error.status in (403, 400, 422):
                    why = Why.FORBIDDEN if error.status == 403 else Why.INVALID
                    raise GivenUp(why, f"binding volumes: {what}: {error.message}") from None
                if error.status not in (401, 429):
                    failures += 1
                reason = str(error)
            except Unreachable as error:
                failures = 0
                reason = str(error)
            if failures >= MOST_FAILURES:
                raise GivenUp(Why.FAILING, f"binding volumes: {what}: {reason}")
            _log.info("%s is not written yet for pod %s: %s", what, placement.key, reason)
            found = None
            await pauses.rest()

    def _request(self, method: str, path: str, body: bytes | None = None) -> Awaitable[bytes]:
        async def send() -> bytes:
            async with self._gate:
                if body is None:
                    return await self._client.request(method, path, tries=1)
                return await self._client.request(
                    method, path, body=body, content_type=MERGE_PATCH, tries=1
                )

        return send()

    # --- waiting -------------------------------------------------------------------------------

    async def _wait(self, placement: Placement, written: Mapping[str, int]) -> None:
        """Wait until all claims are bound. Raises GivenUp."""
        planned = placement.volumes
        keys = {*planned.provisions, *(key for pair in planned.binds for key in pair)}
        changed = asyncio.Event()
        for key in keys:
            self._waiting.setdefault(key, {})[placement.uid] = changed
        try:
            while not self._all_bound(placement, written):
                changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await changed.wait()
        finally:
            for key in keys:
                del self._waiting[key][placement.uid]
                if not self._waiting[key]:
                    del self._waiting[key]

    def _all_bound(self, placement: Placement, written: Mapping[str, int]) -> bool:
        """Return whether all claims are bound. Raises GivenUp if one will not be."""
        check_pod(placement, self._pod_of(placement.key))
        return all(
            [
                *(
                    self._is_bound(placement, key, name, written[name])
                    for key, name in placement.volumes.binds
                ),
                *(
                    self._is_provisioned(placement, key, written[key])
                    for key in placement.volumes.provisions
                ),
            ]
        )

    def _is_bound(self, placement: Placement, key: str, name: str, version: int) -> bool:
        claim, volume = self._claims.items.get(key), self._volumes.items.get(name)
        if claim is None:
            raise _missing(key)
        if volume is None:
            raise GivenUp(Why.CONFLICT, f"binding volumes: PersistentVolume {name} not found")
        if _version(volume.metadata.resource_version) < version:
            return False
        reference = volume.spec.claim_ref
        if reference is None or reference.uid != claim.metadata.uid:
            raise GivenUp(Why.CONFLICT, f'binding volumes: ClaimRef got reset for pv "{name}"')
        self._check_reach(placement, name)
        return claim.is_bound

    def _is_provisioned(self, placement: Placement, key: str, version: int) -> bool:
        claim = self._claims.items.get(key)
        if claim is None:
            raise _missing(key)
        if _version(claim.metadata.resource_version) < version:
            return False
        if claim.selected_node != placement.node:
            # A provisioner takes the node away when it cannot make the volume there.
            raise GivenUp(
                Why.CONFLICT,
                f'binding volumes: provisioning failed for PVC "{claim.metadata.name}"',
            )
        if not claim.is_bound or claim.spec.volume_name not in self._volumes.items:
            return False
        self._check_reach(placement, claim.spec.volume_name)
        return True

    def _check_reach(self, placement: Placement, volume: str) -> None:
        reaches = self._reaches(volume, placement.node)
        if reaches is None:
            raise GivenUp(Why.CONFLICT, f'binding volumes: failed to get node "{placement.node}"')
        if not reaches:
            raise GivenUp(
                Why.CONFLICT,
                f'binding volumes: pv "{volume}" node affinity doesn\'t match node '
                f'"{placement.node}"',
            )


def _reference(volume: PersistentVolume, claim: PersistentVolumeClaim) -> dict[str, object] | None:
    """Return the patch that reserves a volume for a claim, None if it refers to it already."""
    meta, reference, of = volume.metadata, volume.spec.claim_ref, claim.metadata
    if reference is not None:
        same = (reference.namespace, reference.name) == (of.namespace, of.name)
        if not same or reference.uid not in ("", of.uid):
            raise GivenUp(
                Why.CONFLICT,
                f"binding volumes: PersistentVolume {meta.name} belongs to claim "
                f"{reference.namespace}/{reference.name}, not to {of.namespace}/{of.name}",
            )
        if reference.uid == of.uid:
            return None
    metadata: dict[str, object] = {"uid": meta.uid, "resourceVersion": meta.resource_version}
    if reference is None:
        # A reference that a user set is not taken back by the volume controller; ours may be.
        metadata["annotations"] = {ANNOTATION_BOUND_BY_CONTROLLER: "yes"}
    return {
        "metadata": metadata,
        "spec": {
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": of.namespace,
                "name": of.name,
                "uid": of.uid,
                "resourceVersion": of.resource_version,
            }
        },
    }


def _selection(claim: PersistentVolumeClaim, node: str) -> dict[str, object] | None:
    """Return the patch that has a claim's volume made for a node, None if it is so already."""
    meta = claim.metadata
    if meta.deletion_timestamp is not None:
        raise GivenUp(
            Why.CONFLICT, f'binding volumes: persistentvolumeclaim "{meta.name}" is being deleted'
        )
    if claim.selected_node == node:
        return None
    if claim.selected_node or claim.spec.volume_name:
        raise GivenUp(
            Why.CONFLICT,
            f'binding volumes: persistentvolumeclaim "{meta.name}" was given '
            f"{claim.spec.volume_name or claim.selected_node} by another decision",
        )
    return {
        "metadata": {
            "uid": meta.uid,
            "resourceVersion": meta.resource_version,
            "annotations": {ANNOTATION_SELECTED_NODE: node},
        }
    }


def _missing(key: str) -> GivenUp:
    name = key.partition("/")[2]
    return GivenUp(Why.CONFLICT, f'binding volumes: persistentvolumeclaim "{name}" not found')


def _version(text: str) -> int:
    """Return a resource version as a number; Kubernetes lets those of one type be compared."""
    return int(text) if text.isdigit() else 0

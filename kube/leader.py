"""Leader election on a Lease: at most one process acts.

A holder renews every `retry_seconds`; others take the lease over when it was not renewed for
`lease_seconds` by their own clock, so clocks need not agree. A holder that could not renew for
`renew_deadline_seconds`, counted from when it sent the last renewal that succeeded, stops acting
before another process may start, however late answers arrive. A clean end releases the lease. The
defaults, 15 s, 10 s and 2 s, are those of Kubernetes' own components.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from apis.meta import format_micro_time
from kube.client import ApiError, Client, Unreachable, encode_object
from kube.resources import LEASES

_log = logging.getLogger(__name__)


class LeadershipLost(Exception):
    """The lease could not be renewed in time; the process must stop acting."""


class _Spec(msgspec.Struct, rename="camel"):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class _Meta(msgspec.Struct, rename="camel"):
    resource_version: str = ""


class _Lease(msgspec.Struct):
    metadata: _Meta
    spec: _Spec = msgspec.field(default_factory=_Spec)


_decode = msgspec.json.Decoder(_Lease).decode


class LeaderElection:
    """Holds, or waits for, one Lease."""

    def __init__(
        self,
        client: Client,
        *,
        namespace: str,
        name: str,
        identity: str,
        lease_seconds: float = 15,
        renew_deadline_seconds: float = 10,
        retry_seconds: float = 2,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._name = name
        self.identity = identity
        self._lease_seconds = lease_seconds
        self._renew_deadline_seconds = renew_deadline_seconds
        self._retry_seconds = retry_seconds
        self.leading = False
        self._seen: tuple[str | None, str | None] | None = None
        self._seen_at = 0.0
        self._held_since = 0.0
        """When the last request that acquired or renewed the lease was sent: the earliest moment
        from which others may count `lease_seconds`."""

    @property
    def lease_age_seconds(self) -> float:
        """How long ago the lease was last acquired or renewed; 0 while it is not ours."""
        return asyncio.get_running_loop().time() - self._held_since if self.leading else 0.0

    async def run(self, lead: Callable[[], Awaitable[None]]) -> None:
        """Wait for the lease, then run `lead` while it is held; return when `lead` returns.

        Raises LeadershipLost after having cancelled `lead` when renewing failed.
        """
        await self._acquire()
        work = asyncio.ensure_future(lead())
        renewal = asyncio.ensure_future(self._renew())
        try:
            done, _ = await asyncio.wait({work, renewal}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self.leading = False
            for task in (work, renewal):
                task.cancel()
            await asyncio.gather(work, renewal, return_exceptions=True)
            try:
                # A server that is silent must not keep the process from ending.
                async with asyncio.timeout(self._renew_deadline_seconds / 2):
                    await self._release()
            except TimeoutError:
                _log.info("lease %s/%s was not released in time", self._namespace, self._name)

    async def _acquire(self) -> None:
        _log.info("waiting for lease %s/%s as %s", self._namespace, self._name, self.identity)
        while True:
            try:
                taken = await asyncio.wait_for(self._try(), self._renew_deadline_seconds)
            except TimeoutError:
                taken = False
            if taken:
                self.leading = True
                _log.info("lease %s/%s is ours", self._namespace, self._name)
                return
            await asyncio.sleep(self._retry_seconds * random.uniform(1, 1.2))

    async def _renew(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            left = self._held_since + self._renew_deadline_seconds - loop.time()
            await asyncio.sleep(min(self._retry_seconds, max(left / 2, 0.05)))
            left = self._held_since + self._renew_deadline_seconds - loop.time()
            try:
                renewed = left > 0 and await asyncio.wait_for(self._try(), left)
            except TimeoutError:
                renewed = False
            late = loop.time() - self._held_since >= self._renew_deadline_seconds
            if not renewed and (late or self._taken()):
                raise LeadershipLost(f"lease {self._namespace}/{self._name} was not renewed")

    def _taken(self) -> bool:
        return self._seen is not None and self._seen[0] not in (None, "", self.identity)

    async def _try(self) -> bool:
        """Acquire or renew the lease; return whether it is ours now."""
        try:
            return await self._try_once()
        except (ApiError, Unreachable) as error:
            if not (isinstance(error, ApiError) and error.status == 409):
                _log.warning("lease %s/%s: %s", self._namespace, self._name, error)
            return False
        except msgspec.DecodeError as error:
            # Renewing is tried again; the deadline ends what cannot be renewed.
            _log.warning("lease %s/%s is not readable: %s", self._namespace, self._name, error)
            return False

    async def _try_once(self) -> bool:
        now = datetime.now(UTC)
        lease = await self._client.find(LEASES, self._name, _decode, namespace=self._namespace)
        if lease is None:
            sent = asyncio.get_running_loop().time()
            spec = _Spec(self.identity, round(self._lease_seconds), None, None, 0)
            await self._client.create(
                LEASES, self._body(spec, now, acquired=True), namespace=self._namespace
            )
            self._held_since = sent
            return True
        spec = lease.spec
        record = (spec.holder_identity, spec.renew_time)
        loop_now = asyncio.get_running_loop().time()
        if record != self._seen:
            self._seen = record
            self._seen_at = loop_now
        ours = spec.holder_identity == self.identity
        free = not spec.holder_identity
        valid_for = max(self._lease_seconds, float(spec.lease_duration_seconds or 0))
        if not ours and not free and loop_now < self._seen_at + valid_for:
            return False
        taken_over = not ours
        new = _Spec(
            self.identity,
            round(self._lease_seconds),
            spec.acquire_time,
            None,
            (spec.lease_transitions or 0) + (1 if taken_over else 0),
        )
        await self._client.replace(
            LEASES,
            self._name,
            self._body(
                new, now, acquired=taken_over, resource_version=lease.metadata.resource_version
            ),
            namespace=self._namespace,
        )
        self._seen = (self.identity, format_micro_time(now))
        self._seen_at = self._held_since = loop_now
        return True

    async def _release(self) -> None:
        try:
            lease = await self._client.find(LEASES, self._name, _decode, namespace=self._namespace)
            if lease is not None and lease.spec.holder_identity == self.identity:
                lease.spec.holder_identity = ""
                lease.spec.lease_duration_seconds = 1
                await self._client.replace(
                    LEASES,
                    self._name,
                    self._body(
                        lease.spec,
                        datetime.now(UTC),
                        resource_version=lease.metadata.resource_version,
                    ),
                    namespace=self._namespace,
                )
        except (ApiError, Unreachable, msgspec.DecodeError) as error:
            _log.info("lease %s/%s was not released: %s", self._namespace, self._name, error)

    def _body(
        self,
        spec: _Spec,
        now: datetime,
        *,
        acquired: bool = False,
        resource_version: str = "",
    ) -> bytes:
        spec.renew_time = format_micro_time(now)
        if acquired:
            spec.acquire_time = spec.renew_time
        metadata: dict[str, Any] = {"name": self._name, "namespace": self._namespace}
        if resource_version:
            metadata["resourceVersion"] = resource_version
        return encode_object(LEASES, {"metadata": metadata, "spec": msgspec.to_builtins(spec)})

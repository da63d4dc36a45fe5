"""Keeps the status of ElasticQuotas: what each uses, requests and may use now.

`status.used` and the annotations are patched where they differ from the table by more than zeros;
the rest of an object is never written. The built-in quotas are created where they are missing, so
that users see what pods of no other quota use. Which annotations: docs/facts/scheduler.md, "Status
of quotas".
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from apis.decode import canonical_json, json_decoder, to_plain
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_QUOTA_ALLOCATED,
    ANNOTATION_QUOTA_CHILD_REQUEST,
    ANNOTATION_QUOTA_GUARANTEED,
    ANNOTATION_QUOTA_NON_PREEMPTIBLE_REQUEST,
    ANNOTATION_QUOTA_NON_PREEMPTIBLE_USED,
    ANNOTATION_QUOTA_REQUEST,
    ANNOTATION_QUOTA_RUNTIME,
    DEFAULT_QUOTA,
    LABEL_QUOTA_ALLOW_LENT_RESOURCE,
    LABEL_QUOTA_IS_PARENT,
    LABEL_QUOTA_PARENT,
    ROOT_QUOTA,
    SYSTEM_QUOTA,
)
from apis.quantity import Quantity, ResourceList
from apis.quota import ElasticQuota
from cluster.quota_tree import resource_annotation
from cluster.scheduler.tables.amounts import Amounts
from cluster.scheduler.tables.quotas.definitions import quantity_of, whole_amounts
from cluster.scheduler.tables.quotas.figures import QuotaFigures, figures
from cluster.scheduler.tables.quotas.table import QuotaTable
from kube.cache import Event
from kube.client import ApiError, Client, Unreachable, encode_object
from kube.own_writes import OwnWrites
from kube.queue import WorkQueue
from kube.resources import ELASTIC_QUOTAS

_log = logging.getLogger(__name__)

_PAUSE_S: Final = 1.0
"""Between two looks at all quotas; upstream's. Each is up to a quarter longer or shorter, so that
the writes of two clusters' schedulers do not fall together."""
_WORKERS: Final = 4
"""Requests in parallel. Chosen: a late answer must not hold up all other requests."""
_AFTER_WRITE_S: Final = 0.04
"""A worker pauses so long after a patch, so that 4 of them write 100 a second at most. Chosen: the
statuses of 500 quotas that change all the time are 5 s old, and bindings have the API server and
the processor; with half the value they cost twice as much."""
_PART: Final = 50
"""Quotas that are looked at before other work goes on. Measured: 50 take about 2 ms."""
_CREATE_AGAIN_S: Final = 30.0
"""Chosen: the namespace of the built-in quotas may be created later than the scheduler."""

_decode: Final = json_decoder(ElasticQuota)


class QuotaStatuses:
    """Writes statuses; run it with `run`. written: patches since the start."""

    def __init__(
        self,
        client: Client,
        table: QuotaTable,
        quotas: Mapping[str, ElasticQuota],
        *,
        namespace: str,
        built_in: Mapping[str, Mapping[str, Quantity]],
        observe: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """quotas: all objects by namespace/name. namespace: of the built-in quotas. built_in: their
        maxima by name. observe: takes the seconds that each patch took."""
        self._client = client
        self._table = table
        self._quotas = quotas
        self._namespace = namespace
        self._built_in = {ROOT_QUOTA: {}, **built_in}
        self._observe = observe
        self._own: OwnWrites[ElasticQuota] = OwnWrites()
        self._looked: dict[str, QuotaFigures] = {}
        """namespace/name -> figures that were compared with the object as it is now."""
        self._version = -1
        self._touched = True
        self.queue = WorkQueue("quota statuses")
        self.written = 0

    def seen(self, event: Event[ElasticQuota]) -> None:
        """Take a change of a quota."""
        self._own.seen(event)
        self._looked.pop(event.key, None)
        self._touched = True

    async def run(self) -> None:
        """Write until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(_WORKERS):
                tasks.create_task(self.queue.work(self.write))
            tasks.create_task(self._create_built_in())
            while True:
                await self.look()
                await asyncio.sleep(_PAUSE_S * random.uniform(0.75, 1.25))

    async def look(self) -> None:
        """Have the quotas written whose figures or objects changed since the last call."""
        if self._version == self._table.version and not self._touched:
            return
        self._version, self._touched = self._table.version, False
        for number, (key, quota) in enumerate(tuple(self._quotas.items()), start=1):
            try:
                found = self._figures(quota)
            except Exception:  # noqa: BLE001 - one quota must not end the writing of others
                self.queue.faults.note("working out the figures", about=f"ElasticQuota {key}")
                found = None
            if found is not None and self._looked.get(key) != found:
                self._looked[key] = found
                self.queue.add(key)
            if number % _PART == 0:
                await asyncio.sleep(0)

    def _figures(self, quota: ElasticQuota) -> QuotaFigures | None:
        """Return the figures of an object, None if another one or none counts under its name."""
        meta = quota.metadata
        found = figures(self._table, meta.name)
        if found is None:
            return None
        if meta.name in self._built_in:
            return found if meta.namespace == self._namespace else None
        counts = self._table.quotas[meta.name].definition.namespace == meta.namespace
        return found if counts else None

    async def write(self, key: str) -> None:
        """Patch one quota if it differs. Raises ApiError or Unreachable: it is tried again."""
        quota = self._own.latest(key, self._quotas.get(key))
        found = None if quota is None else self._figures(quota)
        if quota is None or found is None or key not in self._quotas:
            self.queue.forget(key)
            return
        patch = status_patch(quota, found)
        if not patch:
            return
        meta = quota.metadata
        patch.setdefault("metadata", {})["uid"] = meta.uid
        began = time.perf_counter()
        try:
            body = await self._client.patch(
                ELASTIC_QUOTAS, meta.name, msgspec.json.encode(patch), namespace=meta.namespace
            )
        except ApiError as error:
            if error.not_found or "metadata.uid" in error.message:
                # It was deleted, and perhaps made again; the watch has not shown that yet.
                return
            raise
        self._observe(time.perf_counter() - began)
        self._own.note(_decode(body))
        self.written += 1
        await asyncio.sleep(_AFTER_WRITE_S)

    # --- built-in quotas -----------------------------------------------------------------------

    async def _create_built_in(self) -> None:
        while True:
            missing = self._missing()
            for name in missing:
                try:
                    await self._create(name)
                except (ApiError, Unreachable) as error:
                    _log.warning(
                        "ElasticQuota %s/%s is not created yet: %s", self._namespace, name, error
                    )
            await asyncio.sleep(_CREATE_AGAIN_S)

    def _missing(self) -> Iterable[str]:
        return [name for name in self._built_in if f"{self._namespace}/{name}" not in self._quotas]

    async def _create(self, name: str) -> None:
        labels = {}
        if name == ROOT_QUOTA:
            labels = {
                LABEL_QUOTA_IS_PARENT: "true",
                LABEL_QUOTA_ALLOW_LENT_RESOURCE: "false",
                LABEL_QUOTA_PARENT: "",
            }
        body: dict[str, Any] = {
            "metadata": {"name": name, "namespace": self._namespace, "labels": labels},
            "spec": {"max": {key: str(amount) for key, amount in self._built_in[name].items()}},
        }
        try:
            await self._client.create(
                ELASTIC_QUOTAS, encode_object(ELASTIC_QUOTAS, body), namespace=self._namespace
            )
        except ApiError as error:
            if not error.already_exists:
                raise


def built_in_maxima(
    default: Mapping[str, Quantity], system: Mapping[str, Quantity]
) -> dict[str, Mapping[str, Quantity]]:
    """Return the maxima of the built-in quotas by name."""
    return {DEFAULT_QUOTA: default, SYSTEM_QUOTA: system}


def status_patch(quota: ElasticQuota, found: QuotaFigures) -> dict[str, Any]:
    """Return the merge patch that has an object show its figures; {} if it does."""
    annotations = {
        key: canonical_json(to_plain(_list_of(amounts)))
        for key, amounts in (
            (ANNOTATION_QUOTA_RUNTIME, found.runtime),
            (ANNOTATION_QUOTA_REQUEST, found.request),
            (ANNOTATION_QUOTA_CHILD_REQUEST, found.child_request),
            (ANNOTATION_QUOTA_GUARANTEED, found.guaranteed),
            (ANNOTATION_QUOTA_ALLOCATED, found.allocated),
            (ANNOTATION_QUOTA_NON_PREEMPTIBLE_REQUEST, found.firm_request),
            (ANNOTATION_QUOTA_NON_PREEMPTIBLE_USED, found.firm_used),
        )
        if not _shows(quota, key, amounts)
    }
    patch: dict[str, Any] = {}
    if annotations:
        patch["metadata"] = {"annotations": annotations}
    if not _equal(whole_amounts(quota.status.used), found.used):
        gone = {name: None for name in quota.status.used if name not in found.used}
        patch["status"] = {"used": {**gone, **to_plain(_list_of(found.used))}}
    return patch


def _shows(quota: ElasticQuota, key: str, amounts: Amounts) -> bool:
    """Return whether an annotation shows these amounts; an unreadable one shows nothing."""
    try:
        return _equal(whole_amounts(resource_annotation(quota, key)), amounts)
    except InputError:
        return False


def _equal(left: Amounts, right: Amounts) -> bool:
    return all(left.get(name, 0) == right.get(name, 0) for name in {*left, *right})


def _list_of(amounts: Amounts) -> ResourceList:
    return {name: quantity_of(name, amounts[name]) for name in sorted(amounts)}

"""What runs beside the decisions for ElasticQuota: statuses, and evictions of quotas in overuse.

Evictions respect PodDisruptionBudgets. A refused eviction is repeated when its quota has used too
much for the delay once more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from apis.quota import ElasticQuota
from cluster.scheduler.binding.events import Event, pod_reference
from cluster.scheduler.binding.quota_statuses import QuotaStatuses, built_in_maxima
from cluster.scheduler.configuration.koordinator_arguments import ElasticQuotaArgs
from cluster.scheduler.plugins.quotas.elastic_quota import amounts_text
from cluster.scheduler.plugins.quotas.overuse import OveruseMonitor, Revoked
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.quotas.table import QuotaTable
from kube.client import ApiError, Client, Unreachable
from kube.discovery import Discovery, evict
from kube.faults import Faults

_log = logging.getLogger(__name__)

_LEAST_INTERVAL_S: Final = 0.1
"""Chosen: an interval of 0 in the configuration must not take the whole event loop."""


class QuotaUpkeep:
    """Runs both; see `run`. evicted: pods since the start."""

    def __init__(
        self,
        client: Client,
        table: QuotaTable,
        quotas: Mapping[str, ElasticQuota],
        arguments: ElasticQuotaArgs,
        *,
        record: Callable[[Event], None],
        observe: Callable[[float], None],
    ) -> None:
        """quotas: all objects by namespace/name. record: takes events. observe: takes the seconds
        of each patch of a status."""
        self._client = client
        self._discovery = Discovery(client)
        self._record = record
        self._interval_s = max(float(arguments.revoke_pod_interval), _LEAST_INTERVAL_S)
        self.statuses = QuotaStatuses(
            client,
            table,
            quotas,
            namespace=arguments.quota_group_namespace,
            built_in=built_in_maxima(
                arguments.default_quota_group_max, arguments.system_quota_group_max
            ),
            observe=observe,
        )
        revokes = arguments.monitor_all_quotas and arguments.enable_runtime_quota
        delay_s = float(arguments.delay_evict_time)
        self.monitor = OveruseMonitor(table, delay_s=delay_s) if revokes else None
        self.faults = Faults("overuse of quotas")
        self.evicted = 0

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.statuses.run())
            if self.monitor is not None:
                tasks.create_task(self._watch(self.monitor))

    async def _watch(self, monitor: OveruseMonitor) -> None:
        while True:
            try:
                for revoked in monitor.look(asyncio.get_running_loop().time()):
                    await self.revoke(revoked)
            except Exception:  # noqa: BLE001 - a defect must not end all that runs beside it
                self.faults.note("a look at all quotas")
            await asyncio.sleep(self._interval_s)

    async def revoke(self, revoked: Revoked) -> None:
        """Evict the pods of one quota."""
        note = (
            f"quota {revoked.quota} uses {amounts_text(revoked.used)}, and its runtime is "
            f"{amounts_text(revoked.runtime)}"
        )
        for booking in revoked.pods:
            try:
                await self._evict(booking)
            except (ApiError, Unreachable) as error:
                _log.warning("pod %s is not evicted: %s: %s", booking.key, note, error)
            else:
                self.evicted += 1
                self._record(_event(booking, note))

    async def _evict(self, booking: Booking) -> None:
        namespace, _, name = booking.key.partition("/")
        try:
            await evict(
                self._client, self._discovery, namespace=namespace, name=name, uid=booking.uid
            )
        except ApiError as error:
            if not error.not_found:
                raise


def _event(booking: Booking, note: str) -> Event:
    namespace, _, name = booking.key.partition("/")
    return Event(
        about=pod_reference(namespace, name, booking.uid),
        kind="Warning",
        reason="QuotaOverused",
        action="Evicting",
        note=f"Evicted: {note}",
        controller=booking.shape.scheduler_name,
    )

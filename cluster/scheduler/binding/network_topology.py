"""Keeps the status of the ClusterNetworkTopology: the domains that the nodes' labels make.

Every 10 s the domains are compared with what the object shows, and a difference is written in one
patch that names the version of the object.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import msgspec

from apis.network_topology import ClusterNetworkTopology
from cluster.scheduler.tables.network_topology import NetworkTopology, NetworkTree, detail_of
from kube.client import ApiError, Client, Unreachable
from kube.faults import Faults
from kube.resources import CLUSTER_NETWORK_TOPOLOGIES

_log = logging.getLogger(__name__)

_INTERVAL_S: Final = 10.0
"""Upstream's."""


class NetworkTopologyStatus:
    """Writes the status; run it with `run`."""

    def __init__(
        self,
        client: Client,
        network: NetworkTopology,
        topology: Callable[[], ClusterNetworkTopology | None],
    ) -> None:
        """topology: the object as last seen, or None."""
        self._client = client
        self._network = network
        self._topology = topology
        self._written: tuple[NetworkTree, str] | None = None
        """The tree that the object shows, and the object's version."""
        self.written = 0
        """Patches since the start."""
        self.faults = Faults("network topology status")

    async def run(self, interval_s: float = _INTERVAL_S) -> None:
        """Write until cancelled."""
        while True:
            try:
                await self.write()
            except (ApiError, Unreachable) as error:
                _log.info("the status of the ClusterNetworkTopology is not written yet: %s", error)
            except Exception:  # noqa: BLE001 - a status must not end the scheduler
                self.faults.note("writing the status of the ClusterNetworkTopology")
            await asyncio.sleep(interval_s)

    async def write(self) -> None:
        """Write the status if it differs. Raises ApiError or Unreachable."""
        shown, tree = self._topology(), self._network.tree()
        if shown is None or tree is None:
            return
        version = shown.metadata.resource_version
        if self._written == (tree, version):
            return
        detail = detail_of(tree)
        if detail != shown.status.detail_status:
            patch = {
                "metadata": {"resourceVersion": version},
                "status": {"detailStatus": msgspec.to_builtins(detail)},
            }
            await self._client.patch(
                CLUSTER_NETWORK_TOPOLOGIES,
                shown.metadata.name,
                msgspec.json.encode(patch),
                subresource="status",
            )
            self.written += 1
            return
        self._written = (tree, version)

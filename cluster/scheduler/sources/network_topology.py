"""The ClusterNetworkTopology named `default` into the layers of the network.

One that cannot be used is logged, and the last good one stays in force.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from apis.errors import InputError
from apis.network_topology import ClusterNetworkTopology
from cluster.scheduler.cycle.events import Action, ClusterEvent
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.tables.network_topology import NetworkTopology, layers_of
from cluster.scheduler.tables.shapes import PodShape
from kube.cache import Change, Event

_log = logging.getLogger(__name__)

NAME: Final = "default"
"""The only object that is read, as upstream."""
KIND: Final = "ClusterNetworkTopology"


class NetworkTopologySource:
    """Takes the events of the cache of ClusterNetworkTopologies."""

    def __init__(
        self,
        network: NetworkTopology,
        queue: SchedulingQueue[PodShape],
        *,
        clock: Callable[[], float],
    ) -> None:
        """clock: seconds, as the queue counts them."""
        self._network = network
        self._queue = queue
        self._clock = clock
        self.problem = ""
        """Why the object as it is now is not in force."""

    def topology_event(self, event: Event[ClusterNetworkTopology]) -> None:
        """Take a change of an object."""
        if event.new.metadata.name != NAME:
            return
        if event.change is Change.DELETED:
            self.problem = ""
            self._network.set(None)
        elif event.old is not None and event.old.spec == event.new.spec:
            # The status, which this scheduler writes.
            return
        else:
            try:
                layers = layers_of(event.new)
            except InputError as error:
                if self.problem != str(error):
                    self.problem = str(error)
                    _log.warning("%s; the former topology stays in force", error)
                return
            self.problem = ""
            self._network.set(layers)
        self._queue.cluster_event(ClusterEvent(KIND, Action.UPDATE_OTHER), self._clock())

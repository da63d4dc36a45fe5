"""The ConfigMap with the templates of shared GPUs, watched into the table of devices."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any, Final

from apis.core import ConfigMap
from apis.errors import InputErrors
from cluster.scheduler.configuration.koordinator_arguments import GPUSharedResourceTemplatesConfig
from cluster.scheduler.cycle.events import Action, ClusterEvent
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.exact.devices.templates import DATA_KEY, parse_templates
from cluster.scheduler.tables.devices.table import DeviceTable
from kube.cache import Cache, Change, Event
from kube.client import Client
from kube.resources import CONFIG_MAPS
from service.manifest import NotYaml, document

_log = logging.getLogger(__name__)

_MOST_VALUES: Final = 50_000
"""Of the text; chosen: upstream's has about 200."""


class TemplateSource:
    """Takes the templates into the table. A text that cannot be used leaves the last good one."""

    def __init__(
        self,
        client: Client,
        named: GPUSharedResourceTemplatesConfig,
        devices: DeviceTable,
        queue: SchedulingQueue[Any],
        *,
        clock: Callable[[], float],
    ) -> None:
        self._key = f"{named.config_map_namespace}/{named.config_map_name}"
        self._obj = f"ConfigMap {self._key}"
        self._devices = devices
        self._queue = queue
        self._clock = clock
        self._problem = ""
        """Why the present text is not in force."""
        self.cache: Cache[ConfigMap] = Cache(
            client,
            CONFIG_MAPS,
            ConfigMap,
            namespace=named.config_map_namespace,
            field_selector=f"metadata.name={named.config_map_name}",
        )
        self.cache.subscribe(self.changed)

    def changed(self, event: Event[ConfigMap]) -> None:
        """Take a change of the ConfigMap. Without it there are no templates.

        Objects from files hold other ConfigMaps too, which are ignored.
        """
        if event.key != self._key:
            return
        text = "" if event.change is Change.DELETED else event.new.data.get(DATA_KEY, "")
        try:
            tree = document(text, most_values=_MOST_VALUES)
            # The decoder of objects reads JSON.
            raw = json.dumps({} if tree is None else tree)
            templates = parse_templates(raw, obj=self._obj)
        except (InputErrors, NotYaml, TypeError, ValueError) as error:
            if self._problem != str(error):
                self._problem = str(error)
                _log.warning("%s: the former templates stay in force: %s", self._obj, error)
            return
        self._problem = ""
        self._devices.set_templates(templates)
        self._queue.cluster_event(ClusterEvent("Device", Action.UPDATE_OTHER), self._clock())

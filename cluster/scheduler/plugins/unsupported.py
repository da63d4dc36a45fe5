"""Refuses pods that ask for what this scheduler does not decide, instead of ignoring it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from apis.keys import ANNOTATION_RESERVATION_AFFINITY
from cluster.scheduler.plugins.contract import Refusal
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

_OTHER_GANGS: Final = "(gangs of Kubernetes; a gang of Koordinator is named by a label)"


@dataclass(frozen=True, slots=True)
class Unsupported:
    """An admission: a pod passes if everything that it asks for is decided here.

    reservations: the profile decides about reservations.
    """

    reservations: bool = False
    name: str = "Unsupported"

    def check(self, pod: PodShape, tables: Tables) -> None:
        """Raises Refusal with the field that cannot be served."""
        for asked, field in (
            (pod.resource_claims, "spec.resourceClaims (dynamic resource allocation)"),
            (pod.spec.scheduling_group is not None, f"spec.schedulingGroup {_OTHER_GANGS}"),
            (pod.spec.workload_ref is not None, f"spec.workloadRef {_OTHER_GANGS}"),
            (
                not self.reservations and ANNOTATION_RESERVATION_AFFINITY in pod.annotations,
                f'metadata.annotations["{ANNOTATION_RESERVATION_AFFINITY}"]',
            ),
        ):
            if asked:
                raise Refusal(
                    self.name,
                    f"this scheduler does not support {field}; "
                    "choose another scheduler by spec.schedulerName",
                )

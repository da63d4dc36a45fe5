"""Reservations and their reserve pods for tests."""

from __future__ import annotations

from typing import Any

import msgspec

from apis.decode import json_decoder
from apis.scheduling import Reservation
from cluster.scheduler.sources.reserve_pods import ReservePod, read_reserve_pod

_decode = json_decoder(Reservation)


def template(cpu: str = "4", **members: Any) -> dict[str, Any]:
    spec = {
        "schedulerName": "koord-scheduler",
        "containers": [{"name": "main", "resources": {"requests": {"cpu": cpu, "memory": "8Gi"}}}],
        **members.pop("spec", {}),
    }
    return {"metadata": {"creationTimestamp": None, **members.pop("metadata", {})}, "spec": spec}


def reservation(
    template: Any = None,
    *,
    metadata: dict[str, Any] | None = None,
    status: dict[str, Any] | None = None,
    **spec: Any,
) -> Reservation:
    return _decode(
        msgspec.json.encode(
            {
                "metadata": {"name": "r", "uid": "u", **(metadata or {})},
                "spec": {"template": template, "owners": [{}], "ttl": "24h", **spec},
                "status": status or {},
            }
        )
    )


def read(*args: Any, **members: Any) -> ReservePod:
    return read_reserve_pod(reservation(*args, **members))

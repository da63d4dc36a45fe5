"""What kubelet starts again after its containers were stopped or its pod was deleted."""

from __future__ import annotations

from typing import Final

from hooks.subject import Pod

_STATIC: Final = ("kubernetes.io/config.source", "kubernetes.io/config.mirror")
"""Annotations of a static pod; the source "api" is an ordinary pod's."""
_RESTARTS: Final = frozenset({"Always", "OnFailure"})
"""Restart policies with which kubelet starts a container again that was ended by a signal."""


def is_static(pod: Pod) -> bool:
    """Return whether kubelet runs the pod from a file, and starts it again after a deletion."""
    source, mirror = (pod.annotations.get(key, "") for key in _STATIC)
    return bool(mirror) or source not in ("", "api")


def restarts_containers(pod: Pod) -> bool:
    """Return whether kubelet starts containers of the pod again that were stopped."""
    return pod.restart_policy in _RESTARTS

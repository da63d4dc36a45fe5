"""A pod's shape: everything that policies may look at, except what identifies the pod.

Replicas have one shape, and a node creates many of them. Claims for a container of one hold for the
container of the same name and with the same request of the next, so the engine caches outcomes by
shape, name and request. A pod is decided by itself when a policy's claims depend on which
pod it is (`Policy.individual`).

Of labels and annotations only those of Koordinator's domain count: no policy reads others, and
others (a pod's own name, its address) would give every pod a shape of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Final

from hooks.subject import Pod

_DOMAIN: Final = "koordinator.sh/"


def shape_of(pod: Pod) -> Hashable:
    """Return the shape: equal shapes get equal claims from every policy that is not individual."""
    return (
        _ours(pod.labels),
        _ours(pod.annotations),
        pod.kube_qos,
        pod.qos,
        pod.priority,
        pod.runtime_handler,
        pod.host_network,
        pod.specs,
        pod.resources,
        pod.overhead,
    )


def _ours(words: Mapping[str, str]) -> Hashable:
    return frozenset((key, value) for key, value in words.items() if _DOMAIN in key)

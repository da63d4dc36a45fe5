"""`Snapshot`: the immutable value that the reconciler works from.

The event loop makes a new one when the state changed. The reconciler's thread reads it without a
lock and never sees a half-made state.
"""

from __future__ import annotations

import msgspec

from hooks.engine import Engine
from hooks.subject import Subject


class Snapshot(msgspec.Struct, frozen=True):
    """The engine in force and every subject of the node.

    subjects: top-down: node, QoS directories, pods, sandboxes and containers, host applications.
        An unchanged subject is the same object as in the former snapshot, since decisions are
        cached by identity first.
    complete: the first list of every configured source of pods has arrived. Before that, an absent
        subject may merely not be known yet, so none of its values is restored.
    requests: how many of kubelet's requests for running containers the subjects follow from.
    """

    engine: Engine
    subjects: tuple[Subject, ...]
    complete: bool = True
    requests: int = 0

"""`Snapshot`: what the reconciler works from, one immutable value.

Whoever holds the node's state makes a new one when something changed and hands it out by
reference; the reconciler never sees a half-made state and takes no lock.
"""

from __future__ import annotations

import msgspec

from hooks.engine import Engine
from hooks.subject import Subject


class Snapshot(msgspec.Struct, frozen=True):
    """The engine in force and every subject of the node.

    subjects: top-down: node, QoS directories, pods, then sandboxes and containers, host
        applications. A subject that did not change is the same object as in the snapshot before:
        decisions are cached by identity first.
    complete: every configured source of pods has spoken. Before that, a subject that is missing
        may merely not be known yet, and nothing of it is restored.
    """

    engine: Engine
    subjects: tuple[Subject, ...]
    complete: bool = True

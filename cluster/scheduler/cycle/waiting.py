"""What the scheduling queue knows about each pod that waits, and about pods that wait together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Generic, TypeVar

from cluster.scheduler.cycle.ordered import OrderedItem
from cluster.scheduler.tables.pending import PendingPod, Shape

S = TypeVar("S", bound=Shape)

POD_ADDED: Final = "UnschedulablePodAdd"
POD_EDITED: Final = "UnschedulablePodUpdate"
POD_GONE: Final = "UnschedulablePodDelete"
GATE_OPENED: Final = "UnschedulablePodUpdatePodSchedulingGatesEliminated"
ATTEMPT_FAILED: Final = "ScheduleAttemptFailure"
BACKOFF_OVER: Final = "BackoffComplete"
TRIED_EARLY: Final = "PopFromBackoffQ"
WAITED_LONG: Final = "UnschedulableTimeout"
ACTIVATED: Final = "ForceActivate"
STATE_CHANGED: Final = "StateChange"
"""Why a pod comes to a state, in kube-scheduler's words but for the last, which stands for all
changes since a plugin's state was last looked at. Changes of the cluster: `event_name`."""


class QueueState(Enum):
    """What a pod of the queue waits for. The values but the last are those of the label `queue` of
    the metric scheduler_pending_pods."""

    ACTIVE = "active"
    BACKOFF = "backoff"
    UNSCHEDULABLE = "unschedulable"
    GATED = "gated"
    IN_FLIGHT = "in flight"


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long a pod waits after its n-th refusal in a row: initial * 2^(n-1), at most `longest`.

    The defaults are kube-scheduler's podInitialBackoffSeconds and podMaxBackoffSeconds.
    """

    initial_s: float = 1.0
    longest_s: float = 10.0

    def after(self, refusals: int) -> float:
        """Return the seconds to wait after `refusals` refusals in a row."""
        doublings = min(max(refusals - 1, 0), 60)  # 2^60 s: beyond any limit, within a float
        return min(self.initial_s * 2.0**doublings, self.longest_s)


@dataclass(frozen=True, slots=True)
class Gate(Generic[S]):
    """A plugin that keeps pods out of the queue. test: pod -> why it has to wait, or None."""

    plugin: str
    test: Callable[[PendingPod[S]], str | None]


def scheduling_gates(pod: PendingPod[S]) -> str | None:
    """Return why a pod with spec.schedulingGates waits, in kube-scheduler's words."""
    gates = pod.shape.gates
    return f"waiting for scheduling gates: [{' '.join(gates)}]" if gates else None


@dataclass(frozen=True, slots=True)
class Gated(Generic[S]):
    """A pod that a gate keeps out."""

    pod: PendingPod[S]
    plugin: str
    reason: str


class Entry(OrderedItem, Generic[S]):
    """A pod in the queue, or in flight."""

    __slots__ = (
        "attempts",
        "edited",
        "entered",
        "errors",
        "gate",
        "held",
        "order",
        "pod",
        "refusals",
        "since",
        "state",
        "until",
    )  # fmt: skip

    def __init__(self, pod: PendingPod[S], now: float) -> None:
        super().__init__()
        self.pod = pod
        self.state = QueueState.GATED
        self.held: Held[S] | None = None
        """The pods that it waits with; `state` is theirs then."""
        self.gate: Gated[S] | None = None
        self.since = min(pod.created, now)
        """Orders pods of one priority: creation, passing the gates or the last refusal."""
        self.entered: float | None = None
        self.attempts = 0
        self.order = 0
        """Of its last attempt, among those of all pods. What is undone later helps only pods whose
        attempt came after this one."""
        self.refusals = 0
        self.errors = 0
        self.until = 0.0
        """When its back-off after an error ends, while it is in one."""
        self.edited = False
        """In flight, and what plugins look at has changed since."""


HeldKey = tuple[str, Shape, int, str]
"""Gang, shape, priority, and the UID of a pod that waits alone."""


class Held(OrderedItem, Generic[S]):
    """Refused pods that wait, and are tried, together: of one shape, priority and gang."""

    __slots__ = (
        "joined",
        "key",
        "linked",
        "order",
        "pods",
        "probes",
        "refusals",
        "refused_at",
        "state",
    )  # fmt: skip

    def __init__(self, key: HeldKey) -> None:
        super().__init__()
        self.key = key
        self.pods: OrderedDict[str, Entry[S]] = OrderedDict()
        self.state = QueueState.UNSCHEDULABLE
        self.joined = 0
        """Of the pods, those that are not counted as come to `state` yet."""
        self.probes: tuple[tuple[PendingPod[S], frozenset[str]], ...] = ()
        """The pods whose refusals hold these up, with the plugins that refused. One, except where
        several members of a gang were refused."""
        self.linked: tuple[str, ...] = ()
        """Plugins under which these pods are found while they are unschedulable."""
        self.refusals = 0
        self.refused_at = 0.0
        self.order = 0
        """Of the attempt that was refused."""

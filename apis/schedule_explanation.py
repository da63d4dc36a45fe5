"""ScheduleExplanation: why pods are or are not scheduled."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from apis.core import ObjectMeta
from apis.decode import Wire
from apis.meta import AnyJson, Time


class PossibleVictim(Wire, frozen=True):
    """A pod that could be preempted.

    namespace: Namespace of the pod.
    name: Name of the pod.
    uid: UID of the pod.
    is_nominated_pod: Whether the pod is only nominated for the node.
    """

    namespace: str = ""
    name: str = ""
    uid: str = ""
    is_nominated_pod: bool = False


class NodePossibleVictims(Wire, frozen=True):
    """Pods of one node that could be preempted.

    node_name: Name of the node.
    possible_victims: The pods.
    """

    node_name: str = ""
    possible_victims: tuple[PossibleVictim, ...] = ()


class FeasibleSchedulingResult(Wire, frozen=True):
    """Where one pod could run.

    namespace: Namespace of the pod.
    name: Name of the pod.
    uid: UID of the pod.
    node_name: Node that it could run on.
    """

    namespace: str = ""
    name: str = ""
    uid: str = ""
    node_name: str = ""


class NodeFailedDetail(Wire, frozen=True):
    """Nodes that were refused for one reason.

    failed_plugin: Scheduler plugin that refused them.
    reason: Why they were refused.
    preempt_might_help: Whether preemption could make room.
    failed_nodes: Names of the nodes.
    """

    failed_plugin: str = ""
    reason: str = ""
    preempt_might_help: bool = False
    failed_nodes: tuple[str, ...] = ()


class SchedulingAttempt(Wire, frozen=True):
    """Result of one attempt to schedule.

    schedulable: Whether all pods found a node.
    failed_message: Why not.
    feasible_scheduling_result: Where each pod could run.
    node_failed_details: Which nodes were refused, by reason.
    """

    schedulable: bool = False
    failed_message: str = ""
    feasible_scheduling_result: tuple[FeasibleSchedulingResult, ...] = ()
    node_failed_details: tuple[NodeFailedDetail, ...] = ()


class DetailedExplanation(Wire, frozen=True):
    """What was found out within one topology domain.

    topology_domain: The domain.
    schedulable: Whether the pods can be scheduled there.
    schedulable_after_preemption: Whether they can after preemption.
    failed_message: Why not.
    schedule_explanation: The attempt without preemption.
    node_possible_victims: Pods that could be preempted, by node.
    preempt_explanation: The attempt with preemption.
    """

    topology_domain: str = ""
    schedulable: bool = False
    schedulable_after_preemption: bool = False
    failed_message: str = ""
    schedule_explanation: SchedulingAttempt | None = None
    node_possible_victims: tuple[NodePossibleVictims, ...] = ()
    preempt_explanation: SchedulingAttempt | None = None


class ScheduleExplanationSpec(Wire, frozen=True):
    """What is to be explained.

    question_object_key: namespace/name of a pod or of a job, or ids of gangs.
    question_object_template: Pod template to ask about. Not supported yet.
    ttl: How long the object is kept, such as 24h; 0s is without end.
    """

    question_object_key: str = ""
    question_object_template: AnyJson = None
    ttl: Annotated[str | None, Meta(extra_json_schema={"default": "24h"})] = None


class ScheduleExplanationStatus(Wire, frozen=True):
    """The explanation.

    schedulable: Whether the pods can be scheduled.
    schedulable_after_preemption: Whether they can after preemption.
    failed_message: Why not.
    last_update_time: When the explanation was last renewed.
    detailed_explanation: What was found out, by topology domain.
    """

    schedulable: bool = False
    schedulable_after_preemption: bool = False
    failed_message: str = ""
    last_update_time: Time | None = None
    detailed_explanation: tuple[DetailedExplanation, ...] = ()


class ScheduleExplanation(Wire, frozen=True):
    """Explains why pods are or are not scheduled.

    spec: What is to be explained.
    status: The explanation.
    """

    metadata: ObjectMeta = ObjectMeta()
    spec: ScheduleExplanationSpec = ScheduleExplanationSpec()
    status: ScheduleExplanationStatus = ScheduleExplanationStatus()

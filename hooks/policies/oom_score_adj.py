"""OOMScoreAdj: which containers the kernel's OOM killer prefers, by annotations of their pod.

The annotation that names containers counts before the annotation for the whole pod. Sandboxes keep
the runtime's value. Removing the annotation withdraws the claim, which restores kubelet's value.
Keys and range: docs/facts/policies.md, "OOM scores".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from apis.annotations import parse_oom_score_adj, parse_oom_score_adj_spec
from apis.errors import InputError
from apis.keys import ANNOTATION_OOM_SCORE_ADJ, ANNOTATION_OOM_SCORE_ADJ_SPEC
from hooks.claim import Claim, Rank
from hooks.facts import NodeInputs
from hooks.policy import Policy, never
from hooks.subject import ContainerSubject, Level
from linux.resources import Resource

NAME: Final = "OOMScoreAdj"


def parse(inputs: NodeInputs) -> None:
    """Return no rule: the policy depends on the gate and the pod's annotations only."""


def claim_container(rule: None, subject: ContainerSubject) -> Iterator[Claim]:
    pod = subject.pod
    by_container = pod.annotations.get(ANNOTATION_OOM_SCORE_ADJ_SPEC)
    if by_container:
        score = parse_oom_score_adj_spec(by_container, obj=pod.obj).get(subject.name)
        if isinstance(score, InputError):
            raise score.about(pod.obj)
        if score is not None:
            source = f"annotation {ANNOTATION_OOM_SCORE_ADJ_SPEC}.{subject.name}"
            yield _claim(score, "requested for this container", source)
            return
    for_pod = pod.annotations.get(ANNOTATION_OOM_SCORE_ADJ)
    if for_pod:
        score = parse_oom_score_adj(for_pod, obj=pod.obj)
        yield _claim(
            score,
            "requested for all containers of the pod",
            f"annotation {ANNOTATION_OOM_SCORE_ADJ}",
        )


def _claim(score: int, reason: str, source: str) -> Claim:
    return Claim(
        resource=Resource.OOM_SCORE_ADJ,
        value=score,
        policy=NAME,
        reason=reason,
        source=source,
        rank=Rank.POD,
    )


POLICY: Final = Policy(
    name=NAME,
    gate="OOMScoreAdj",
    gate_default=False,
    summary="which containers the OOM killer prefers, by a pod's annotations",
    parse=parse,
    claims={Level.CONTAINER: claim_container},
    individual=never,
)

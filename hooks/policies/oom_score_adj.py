"""OOMScoreAdj: whom the kernel's OOM killer prefers, as the pod asks for its containers.

The annotation that names containers counts before the one for the whole pod. Sandboxes keep what
the runtime gave them. Withdrawing the annotation withdraws the claim, and so restores what kubelet
asked for (hooks.md 8.12). Source: hooks.md 4.11.
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
    """Return no rule: beside the gate, the pod's annotations say everything."""


def claim_container(rule: None, subject: ContainerSubject) -> Iterator[Claim]:
    pod = subject.pod
    by_container = pod.annotations.get(ANNOTATION_OOM_SCORE_ADJ_SPEC)
    if by_container:
        score = parse_oom_score_adj_spec(by_container, obj=pod.obj).get(subject.name)
        if isinstance(score, InputError):
            raise score.about(pod.obj)
        if score is not None:
            source = f"annotation {ANNOTATION_OOM_SCORE_ADJ_SPEC}.{subject.name}"
            yield _claim(score, "asked for this container", source)
            return
    for_pod = pod.annotations.get(ANNOTATION_OOM_SCORE_ADJ)
    if for_pod:
        score = parse_oom_score_adj(for_pod, obj=pod.obj)
        yield _claim(
            score, "asked for all containers of the pod", f"annotation {ANNOTATION_OOM_SCORE_ADJ}"
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
    summary="whom the OOM killer prefers, by a pod's annotations",
    parse=parse,
    claims={Level.CONTAINER: claim_container},
    individual=never,
)

"""Asks extenders about pods, in the background.

Decisions about pods that no extender is interested in go on meanwhile. Extenders filter one after
another, each the nodes that the former ones passed, and then rank what is left at the same time. An
extender that fails fails the pod's attempt, unless it is ignorable; one that cannot rank adds
nothing. The tables may change in between, so the node is chosen by the tables as they are when
the answers have come.

Where a pod finds room only if others are evicted, extenders choose among the nodes that could be
freed, one after another. They may name other victims, but none that the rules of preemption
protect.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from apis.errors import printable
from cluster.scheduler.binding.placement import Placement, pod_as_read
from cluster.scheduler.configuration.extenders import Extender
from cluster.scheduler.cycle.opinions import Opinion
from cluster.scheduler.cycle.proposals import Proposal, Proposals
from cluster.scheduler.extenders.calls import ExtenderCalls
from cluster.scheduler.extenders.wire import (
    ExtenderError,
    Unanswered,
    arguments,
    binding,
    preemption,
    read_bind,
    read_filter,
    read_preemption,
    read_scores,
)
from cluster.scheduler.plugins.contract import Reason
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape
from kube.client import ApiError, Client, Unreachable
from kube.faults import Faults
from kube.resources import PODS

_log = logging.getLogger(__name__)

_AT_ONCE: Final = 16
"""Pods that extenders are asked about at once; chosen, as for bindings. kube-scheduler asks about
one pod after another."""
_VICTIMS_AT_ONCE: Final = 8
"""Victims of one preemption that are read at once, for an extender that is sent whole pods. Chosen:
half of the connections that bindings have."""
_REST_S: Final = 1.0
"""How long an extender is not asked about preemptions after it did not answer. Chosen: the shortest
back-off of a pod. Each question needs a search for victims of up to 130 ms; with an
extender that does not answer, all but one a second would be for nothing."""
_MOST_TEXTS: Final = 50
"""Different messages of one extender about the nodes of one pod; chosen. They stand in the pod's
condition, each with its count; the nodes with further ones are counted together."""
_SCALE: Final = 10
"""Extenders score 0 to 10, plugins 0 to 100; kube-scheduler's factor."""


class Deciding(Protocol):
    """What has pods that extenders are asked about, and takes their opinions."""

    def candidates(self, uid: str) -> tuple[str, ...] | None:
        """Return the nodes that plugins pass now; None for a pod that is not waited for."""
        ...

    def consulted(self, uid: str, opinion: Opinion | None, error: str = "") -> None:
        """Take the opinion; None where no node had to be asked about. error: there is none."""
        ...

    def in_memory(self, uid: str) -> bytes | None:
        """Return the JSON of a pod that the API server does not have, None for any other."""
        ...


class PreemptionProposer(Protocol):
    """What proposes preemptions, and takes those that all extenders agree to."""

    def proposed(self, uid: str) -> Proposals | None:
        """Return the nodes that could be freed now; None: extenders need not be asked any more."""
        ...

    def may_evict(self, uid: str, node: str, victim: str) -> str:
        """Return namespace/name of a victim; "" if it may not be evicted for the pod `uid`."""
        ...

    def agreed(self, uid: str, nodes: Proposals | None, error: str = "") -> None:
        """Take the nodes that all extenders agree to. error: why they could not be asked."""
        ...


@dataclass(slots=True)
class _Extender:
    """One extender. fails: whether its last call failed. rests_until: when it may be asked about
    preemptions again after it did not answer, by the loop's clock. rests_because: why it did not,
    whatever became of other calls since."""

    configured: Extender
    calls: ExtenderCalls
    managed: frozenset[str] = field(init=False)
    fails: bool = False
    rests_until: float = -math.inf
    rests_because: str = ""

    def __post_init__(self) -> None:
        self.managed = frozenset(each.name for each in self.configured.managed_resources)

    def interested(self, pod: PodShape) -> bool:
        if not self.managed:
            return True
        return not self.managed.isdisjoint(pod.requests) or not self.managed.isdisjoint(pod.limits)

    async def call(self, verb: str, body: bytes) -> bytes:
        """Return the answer. Raises ExtenderError, which the caller gives to `failed`."""
        answer = await self.calls.call(verb, body)
        self.fails = False
        return answer

    def rest(self, because: Unanswered) -> None:
        """Have no question about preemptions asked for some time."""
        self.rests_because = str(because)
        self.rests_until = asyncio.get_running_loop().time() + _REST_S

    @property
    def rests(self) -> bool:
        """Whether it is not to be asked about preemptions yet."""
        return asyncio.get_running_loop().time() < self.rests_until

    def failed(self, error: ExtenderError) -> None:
        """Log the first of several failures."""
        if not self.fails:
            _log.warning("extender %s: %s", self.calls.url, error)
        self.fails = True


class Extenders:
    """The extenders of a process. Raises InputError for TLS settings that cannot be used."""

    def __init__(
        self,
        client: Client,
        configured: Sequence[Extender],
        deciding: Deciding,
        preemptions: PreemptionProposer,
        *,
        nodes: Mapping[str, bytes],
        decided: Callable[[], None],
    ) -> None:
        """nodes: name -> JSON, for extenders that are not nodeCacheCapable. decided: called when an
        opinion was taken."""
        self._client = client
        self._deciding = deciding
        self._preemptions = preemptions
        self._nodes = nodes
        self._decided = decided
        self._extenders = [
            _Extender(each, ExtenderCalls(each, obj="extenders", field=f"extenders[{number}]"))
            for number, each in enumerate(configured)
        ]
        self._consulted = [
            each
            for each in self._extenders
            if each.configured.filter_verb or each.configured.prioritize_verb
        ]
        self._preempting = [each for each in self._extenders if each.configured.preempt_verb]
        self._binders = [each for each in self._extenders if each.configured.bind_verb]
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self.faults = Faults("extenders")

    def open(self) -> None:
        """Make calls possible, on the running loop."""
        for each in self._extenders:
            each.calls.open()

    async def stop_asking(self) -> None:
        """Ask about no pod any more. Bindings go on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """End all calls."""
        for each in self._extenders:
            await each.calls.close()

    # --- filter and prioritize -----------------------------------------------------------------

    def concerns(self, pod: PodShape) -> bool:
        """Return whether an extender filters or ranks nodes for a pod."""
        return any(each.interested(pod) for each in self._consulted)

    def ask(self, pod: PendingPod[PodShape]) -> None:
        """Have the extenders asked about a pod."""
        self._start(self._ask(pod))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, pod: PendingPod[PodShape]) -> None:
        opinion, error = None, ""
        try:
            async with self._gate:
                names = self._deciding.candidates(pod.uid)
                if names is None:
                    return
                if names:
                    opinion = await self._opinion(pod, names)
        except (ExtenderError, ApiError, Unreachable) as problem:
            error = str(problem)
        except Exception as problem:  # noqa: BLE001 - the pod must not be in flight for ever
            self.faults.note("asking extenders", about=pod.key)
            error = f"{type(problem).__name__}: {problem}"
        self._deciding.consulted(pod.uid, opinion, error)
        self._decided()

    async def _opinion(self, pod: PendingPod[PodShape], names: tuple[str, ...]) -> Opinion:
        whole = await self._read(pod)
        asked = frozenset(names)
        failed: dict[str, Reason] = {}
        interested = [each for each in self._consulted if each.interested(pod.shape)]
        for each in interested:
            if names and each.configured.filter_verb:
                names = await self._filter(each, whole, names, failed)
        scores: dict[str, int] = {}
        ranking = [each for each in interested if each.configured.prioritize_verb]
        # The only node wins without scores.
        if len(names) > 1:
            for given in await asyncio.gather(*(self._rank(e, whole, names) for e in ranking)):
                for name, score in given.items():
                    scores[name] = scores.get(name, 0) + score
        return Opinion(asked, failed, scores)

    async def _read(self, pod: PendingPod[PodShape]) -> bytes:
        """Return the pod's whole JSON; the caches keep only what plugins look at."""
        known = self._deciding.in_memory(pod.uid)
        if known is not None:
            return known
        namespace, _, name = pod.key.partition("/")
        whole = await self._client.request("GET", PODS.path(namespace=namespace, name=name))
        if pod_as_read(whole).metadata.uid != pod.uid:
            raise ExtenderError(f"pod {pod.key} is another one by now")
        return whole

    def _arguments(self, extender: _Extender, whole: bytes, names: tuple[str, ...]) -> bytes:
        nodes = None if extender.configured.node_cache_capable else self._nodes
        return arguments(whole, names=names, nodes=nodes)

    async def _filter(
        self, extender: _Extender, whole: bytes, names: tuple[str, ...], failed: dict[str, Reason]
    ) -> tuple[str, ...]:
        """Return the nodes that pass, and add the others to `failed`."""
        configured = extender.configured
        try:
            body = self._arguments(extender, whole, names)
            filtered = read_filter(await extender.call(configured.filter_verb, body), names)
        except ExtenderError as error:
            extender.failed(error)
            if configured.ignorable:
                return names
            raise ExtenderError(f"extender {extender.calls.url}: {error}") from None
        passing = frozenset(filtered.passing)
        without_text = f"node(s) didn't pass extender {extender.calls.url}"
        texts: dict[str, str] = {}
        for name in names:
            never = name in filtered.unresolvable
            text = filtered.unresolvable.get(name) or filtered.failed.get(name) or ""
            if name in passing and not text and not never and name not in filtered.failed:
                continue
            if text not in texts and len(texts) < _MOST_TEXTS:
                texts[text] = printable(text) or without_text
            failed[name] = Reason(texts.get(text, without_text), resolvable=not never)
        return tuple(name for name in names if name in passing and name not in failed)

    async def _rank(
        self, extender: _Extender, whole: bytes, names: tuple[str, ...]
    ) -> dict[str, int]:
        """Return what the extender adds to the totals; nothing if it fails, as kube-scheduler."""
        configured = extender.configured
        try:
            body = self._arguments(extender, whole, names)
            scores = read_scores(await extender.call(configured.prioritize_verb, body))
        except ExtenderError as error:
            extender.failed(error)
            return {}
        return {name: score * configured.weight * _SCALE for name, score in scores.items()}

    # --- preempt -------------------------------------------------------------------------------

    def preempts(self, pod: PodShape) -> bool:
        """Return whether an extender is asked which pods are evicted for a pod."""
        return any(each.interested(pod) for each in self._preempting)

    def ask_victims(self, pod: PendingPod[PodShape]) -> None:
        """Have the extenders asked about a preemption for a pod."""
        self._start(self._ask_victims(pod))

    async def _ask_victims(self, pod: PendingPod[PodShape]) -> None:
        agreed: Proposals | None = None
        error = ""
        try:
            async with self._gate:
                self._check_resting(pod)
                proposals = self._preemptions.proposed(pod.uid)
                if proposals is None:
                    self._decided()
                    return
                agreed = await self._agreed(pod, proposals)
        except (ExtenderError, ApiError, Unreachable) as problem:
            error = str(problem)
        except Exception as problem:  # noqa: BLE001 - the pod must not be in flight for ever
            self.faults.note("asking extenders about victims", about=pod.key)
            error = f"{type(problem).__name__}: {problem}"
        self._preemptions.agreed(pod.uid, agreed, error)
        self._decided()

    def _check_resting(self, pod: PendingPod[PodShape]) -> None:
        """Raise ExtenderError if an extender that has to agree did not answer a moment ago."""
        for each in self._preempting:
            if each.interested(pod.shape) and not each.configured.ignorable and each.rests:
                raise ExtenderError(f"extender {each.calls.url}: {each.rests_because}")

    async def _agreed(self, pod: PendingPod[PodShape], proposals: Proposals) -> Proposals:
        """Return the nodes that are left, with the victims that the last extender names."""
        whole = await self._read(pod)
        for each in self._preempting:
            if not proposals or not each.interested(pod.shape):
                continue
            if each.configured.ignorable and each.rests:
                continue
            try:
                proposals = await self._preempt(each, pod, whole, proposals)
            except ExtenderError as error:
                each.failed(error)
                if not each.configured.ignorable:
                    raise ExtenderError(f"extender {each.calls.url}: {error}") from None
        return proposals

    async def _preempt(
        self, extender: _Extender, pod: PendingPod[PodShape], whole: bytes, proposals: Proposals
    ) -> Proposals:
        """Return what one extender leaves. Raises ExtenderError for an answer beyond its rights."""
        known = extender.configured.node_cache_capable
        pods = None if known else await self._victims(proposals)
        body = preemption(whole, proposals, pods=pods)
        try:
            raw = await extender.call(extender.configured.preempt_verb, body)
        except Unanswered as error:
            extender.rest(error)
            raise
        answer = read_preemption(raw)
        agreed: dict[str, Proposal] = {}
        for node, answered in answer.items():
            if node not in proposals:
                raise ExtenderError(
                    f"the answer to preempt has a node that was not proposed: {node!r:.80}"
                )
            if not answered.victims:
                if extender.configured.ignorable:
                    continue
                raise ExtenderError(f"the answer to preempt has no victims on node {node!r:.80}")
            before = proposals[node].victims
            victims = {}
            for uid in answered.victims:
                victims[uid] = before.get(uid) or self._preemptions.may_evict(pod.uid, node, uid)
                if not victims[uid]:
                    raise ExtenderError(
                        f"the answer to preempt has a pod on node {node} that may not be evicted"
                        f" for this one: UID {uid!r:.80}"
                    )
            agreed[node] = Proposal(victims, answered.violations)
        return agreed

    async def _victims(self, proposals: Proposals) -> dict[str, bytes]:
        """Return the JSON of the victims by UID, without those that are gone."""
        keys = {uid: key for each in proposals.values() for uid, key in each.victims.items()}
        at_once = asyncio.Semaphore(_VICTIMS_AT_ONCE)

        async def read(uid: str, key: str) -> bytes | None:
            namespace, _, name = key.partition("/")
            try:
                async with at_once:
                    path = PODS.path(namespace=namespace, name=name)
                    raw = await self._client.request("GET", path)
            except ApiError as error:
                if error.not_found:
                    return None
                raise
            return raw if pod_as_read(raw).metadata.uid == uid else None

        found = await asyncio.gather(*(read(uid, key) for uid, key in keys.items()))
        return {uid: raw for uid, raw in zip(keys, found, strict=True) if raw is not None}

    # --- bind ----------------------------------------------------------------------------------

    def binds(self, pod: PodShape) -> bool:
        """Return whether an extender binds a pod."""
        return any(each.interested(pod) for each in self._binders)

    async def bind(self, placement: Placement) -> bool:
        """Have a pod bound; False: the extender fails and is ignorable. Raises ApiError (409) with
        the extender's message; the pod shows whether it is bound all the same."""
        # A configuration has one extender that binds, at most.
        (extender,) = self._binders
        body = binding(
            namespace=placement.namespace,
            name=placement.name,
            uid=placement.uid,
            node=placement.node,
        )
        try:
            refusal = read_bind(await extender.call(extender.configured.bind_verb, body))
        except ExtenderError as error:
            extender.failed(error)
            refusal = str(error)
        if not refusal:
            return True
        if extender.configured.ignorable:
            return False
        message = f"extender {extender.calls.url}: {refusal}"
        raise ApiError(status=409, reason="Extender", message=message, what="bind")


def needs_nodes(configured: Sequence[Extender]) -> bool:
    """Return whether an extender is sent whole nodes."""
    return any(
        not each.node_cache_capable and (each.filter_verb or each.prioritize_verb)
        for each in configured
    )

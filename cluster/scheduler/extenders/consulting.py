"""Asks extenders about pods, in the background.

Decisions about pods that no extender is interested in go on meanwhile. Extenders filter one after
another, each the nodes that the former ones passed, and then rank what is left at the same time. An
extender that fails fails the pod's attempt, unless it is ignorable; one that cannot rank adds
nothing. The tables may change in between, so the node is chosen by the tables as they are when
the answers have come.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from apis.errors import printable
from cluster.scheduler.binding.placement import Placement, pod_as_read
from cluster.scheduler.configuration.extenders import Extender
from cluster.scheduler.cycle.opinions import Opinion
from cluster.scheduler.extenders.calls import ExtenderCalls
from cluster.scheduler.extenders.wire import (
    ExtenderError,
    arguments,
    binding,
    read_bind,
    read_filter,
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
_MOST_TEXTS: Final = 50
"""Different messages of one extender about the nodes of one pod; chosen. They stand in the pod's
condition, each with its count; the nodes with further ones are counted together."""
_SCALE: Final = 10
"""Extenders score 0 to 10, plugins 0 to 100; kube-scheduler's factor."""


class Deciding(Protocol):
    """Where the pods come from and the opinions go."""

    def candidates(self, uid: str) -> tuple[str, ...] | None:
        """Return the nodes that plugins pass now; None for a pod that is not waited for."""
        ...

    def consulted(self, uid: str, opinion: Opinion | None, error: str = "") -> None:
        """Take the opinion; None where no node had to be asked about. error: there is none."""
        ...


@dataclass(slots=True)
class _Extender:
    """One extender. problem: why its last call failed, "" if it did not."""

    configured: Extender
    calls: ExtenderCalls
    managed: frozenset[str] = field(init=False)
    problem: str = ""

    def __post_init__(self) -> None:
        self.managed = frozenset(each.name for each in self.configured.managed_resources)

    def interested(self, pod: PodShape) -> bool:
        if not self.managed:
            return True
        return not self.managed.isdisjoint(pod.requests) or not self.managed.isdisjoint(pod.limits)

    async def call(self, verb: str, body: bytes) -> bytes:
        """Return the answer. Raises ExtenderError; the log has the first of several failures."""
        try:
            answer = await self.calls.call(verb, body)
        except ExtenderError as error:
            self.failed(error)
            raise
        self.problem = ""
        return answer

    def failed(self, error: ExtenderError) -> None:
        if not self.problem:
            _log.warning("extender %s: %s", self.calls.url, error)
        self.problem = str(error)


class Extenders:
    """The extenders of a process. Raises InputError for TLS settings that cannot be used."""

    def __init__(
        self,
        client: Client,
        configured: Sequence[Extender],
        deciding: Deciding,
        *,
        nodes: Mapping[str, bytes],
        decided: Callable[[], None],
    ) -> None:
        """nodes: name -> JSON, for extenders that are not nodeCacheCapable. decided: called when an
        opinion was taken."""
        self._client = client
        self._deciding = deciding
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
        task = asyncio.create_task(self._ask(pod))
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

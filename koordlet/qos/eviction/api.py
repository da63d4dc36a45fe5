"""Evictions and their events over the API server."""

from __future__ import annotations

import asyncio
from typing import Final

from apis.meta import ObjectReference
from hooks.subject import Pod
from koordlet.qos.eviction.means import Answer, Answered
from kube.client import ApiError, Client, Unreachable
from kube.discovery import Discovery, evict
from kube.events import EventRecorder

_LIMIT_S: Final = 5.0
"""For one eviction. Chosen: an API server answers within milliseconds, and admission webhooks that
it calls mostly within a second. Twice the value doubles how long a server that hangs delays the
other victims of a round."""
_COMPONENT: Final = "koordlet-qosManager"
"""Upstream's source of these events."""


class ApiEvictions:
    """Evicts over one connection; see `EvictionApi`. Belongs to the event loop."""

    def __init__(self, client: Client, node_name: str, *, limit_s: float = _LIMIT_S) -> None:
        self._client = client
        self._limit_s = limit_s
        self._discovery = Discovery(client)
        self._recorder = EventRecorder(client, component=_COMPONENT, host=node_name)
        self._writing: asyncio.Task[None] | None = None
        self.answers = True
        """Whether the last eviction had an answer; True before the first."""

    async def evict(self, pod: Pod) -> Answer:
        answer = await self._evict(pod)
        self.answers = answer.answered is not Answered.UNREACHABLE
        return answer

    async def _evict(self, pod: Pod) -> Answer:
        try:
            async with asyncio.timeout(self._limit_s):
                await evict(
                    self._client,
                    self._discovery,
                    namespace=pod.namespace,
                    name=pod.name,
                    uid=pod.uid,
                )
        except TimeoutError:
            return Answer(Answered.UNREACHABLE, f"no answer within {self._limit_s:g} s")
        except Unreachable as error:
            return Answer(Answered.UNREACHABLE, str(error))
        except ApiError as error:
            # 409: a pod of this name exists, and its uid is another one.
            if error.not_found or error.status == 409:
                return Answer(Answered.GONE, str(error))
            return Answer(Answered.REFUSED, str(error), error.retry_after)
        return Answer(Answered.EVICTED)

    def warn(self, pod: Pod, reason: str, message: str) -> None:
        about = ObjectReference(
            api_version="v1", kind="Pod", namespace=pod.namespace, name=pod.name, uid=pod.uid
        )
        self._recorder.warning(about, reason, message)
        self.write_events()

    def write_events(self) -> None:
        """Begin to write the events that wait; those that a server did not take in its absence."""
        if self._recorder.waiting and (self._writing is None or self._writing.done()):
            self._writing = asyncio.get_running_loop().create_task(self._recorder.flush())

    async def close(self) -> None:
        """End the writing of events."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing])

"""Sandboxes and containers that the proxy knows, by their runtime ids.

Entries come from answered calls, from recovery and from the runtime on demand; they leave when the
runtime has removed the object or no longer lists it. Every change goes to the journal.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Protocol

import msgspec

from runtime_proxy.model import Container, Pod

# What runtimes make ids of; they take the beginning of one for the whole where only one begins so.
_BEGINNING = re.compile(r"[0-9a-f]{1,63}")


class Journal(Protocol):
    """Where changes are recorded; see `checkpoint`."""

    def pod(self, pod: Pod) -> None: ...

    def container(self, container: Container) -> None: ...

    def forget(self, identifier: str) -> None: ...


class NoJournal:
    """For a proxy that keeps nothing on disk."""

    def pod(self, pod: Pod) -> None:
        """Nothing is kept."""

    def container(self, container: Container) -> None:
        """Nothing is kept."""

    def forget(self, identifier: str) -> None:
        """Nothing is kept."""


class Store:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._pods: dict[str, Pod] = {}
        self._containers: dict[str, Container] = {}
        self._of_pod: dict[str, set[str]] = {}
        # Moves with every entry that is added, so that a sweep knows what came after its list.
        self._births: dict[str, int] = {}
        self._births_so_far = 0

    @property
    def sizes(self) -> tuple[int, int]:
        return len(self._pods), len(self._containers)

    @property
    def births(self) -> int:
        """The number of entries ever added: a mark for `sweep`."""
        return self._births_so_far

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._births

    def is_older(self, identifier: str, births: int) -> bool:
        """Return whether the entry was added before the mark `births` was taken."""
        return self._births[identifier] <= births

    def pod(self, identifier: str) -> Pod | None:
        return self._pods.get(identifier)

    def container(self, identifier: str) -> Container | None:
        return self._containers.get(identifier)

    def pod_id(self, reference: str) -> str:
        """Return the whole id of a reference, which may be shortened; itself if unknown."""
        return _whole(reference, self._pods)

    def container_id(self, reference: str) -> str:
        return _whole(reference, self._containers)

    def containers_of(self, pod_id: str) -> Iterator[Container]:
        for identifier in sorted(self._of_pod.get(pod_id, ())):
            yield self._containers[identifier]

    def put_pod(self, pod: Pod) -> None:
        self._born(pod.id)
        if self._pods.get(pod.id) != pod:
            self._pods[pod.id] = pod
            self._journal.pod(pod)

    def put_container(self, container: Container) -> None:
        self._born(container.id)
        if self._containers.get(container.id) != container:
            self._containers[container.id] = container
            self._of_pod.setdefault(container.pod_id, set()).add(container.id)
            self._journal.container(container)

    def stop_pod(self, identifier: str) -> Pod | None:
        """Mark a pod stopped; the pod if it was not marked before."""
        pod = self._pods.get(identifier)
        if pod is None or pod.stopped:
            return None
        self.put_pod(msgspec.structs.replace(pod, stopped=True))
        return pod

    def stop_container(self, identifier: str) -> Container | None:
        """Mark a container stopped; the container if it was not marked before."""
        container = self._containers.get(identifier)
        if container is None or container.stopped:
            return None
        self.put_container(msgspec.structs.replace(container, stopped=True))
        return container

    def drop_container(self, identifier: str) -> None:
        container = self._containers.pop(identifier, None)
        if container is None:
            return
        self._births.pop(identifier, None)
        siblings = self._of_pod.get(container.pod_id, set())
        siblings.discard(identifier)
        if not siblings:
            self._of_pod.pop(container.pod_id, None)
        self._journal.forget(identifier)

    def drop_pod(self, identifier: str) -> None:
        """The pod and what is left of its containers."""
        for container in list(self.containers_of(identifier)):
            self.drop_container(container.id)
        if self._pods.pop(identifier, None) is not None:
            self._births.pop(identifier, None)
            self._journal.forget(identifier)

    def sweep(
        self, *, pods: Collection[str], containers: Collection[str], births: int
    ) -> tuple[list[Pod], list[Container]]:
        """Drop what the runtime does not list; `births` is the mark taken before it was asked.

        Answers what left.
        """
        lost_containers = [
            c
            for i, c in self._containers.items()
            if i not in containers and self.is_older(i, births)
        ]
        lost_pods = [p for i, p in self._pods.items() if i not in pods and self.is_older(i, births)]
        for container in lost_containers:
            self.drop_container(container.id)
        for pod in lost_pods:
            self.drop_pod(pod.id)
        return lost_pods, lost_containers

    def disown(self, identifiers: Iterable[str]) -> None:
        """Remove from the journal what the store lacks: objects removed while no proxy ran."""
        for identifier in identifiers:
            if identifier not in self:
                self._journal.forget(identifier)

    def _born(self, identifier: str) -> None:
        if identifier not in self:
            self._births_so_far += 1
            self._births[identifier] = self._births_so_far


def _whole(reference: str, known: Mapping[str, object]) -> str:
    if reference in known or not _BEGINNING.fullmatch(reference):
        return reference
    found = [identifier for identifier in known if identifier.startswith(reference)]
    return found[0] if len(found) == 1 else reference

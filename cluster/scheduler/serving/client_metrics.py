"""rest_client_* and workqueue_*: what goes to the API server, and the queues behind it.

Names, labels and units are those of client-go and component-base, which all programs of Kubernetes
have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from cluster.exposition import bucket_lines, head_lines, label_text, number_text
from kube.queue import WorkQueue
from kube.request_counts import RequestCounts, VerbCounts
from service.histogram import Histogram

_DURATIONS: Final = (
    ("rest_client_request_duration_seconds", "Duration of a request."),
    ("rest_client_rate_limiter_duration_seconds", "Wait for the limit of clientConnection.qps."),
    ("rest_client_request_size_bytes", "Size of a request's body."),
    ("rest_client_response_size_bytes", "Size of an answer's body."),
)

_WORK: Final[tuple[tuple[str, str, str, Callable[[WorkQueue], float]], ...]] = (
    ("adds_total", "Keys that became due.", "counter", lambda queue: queue.counts.adds),
    (
        "retries_total",
        "Keys that became due again after a failure.",
        "counter",
        lambda queue: queue.counts.retries,
    ),
    ("depth", "Keys that are due.", "gauge", len),
    (
        "unfinished_work_seconds",
        "Work under way.",
        "gauge",
        lambda queue: sum(queue.running()),
    ),
    (
        "longest_running_processor_seconds",
        "Work that has been under way for longest.",
        "gauge",
        lambda queue: max(queue.running(), default=0),
    ),
)


def request_lines(parts: Iterable[RequestCounts]) -> Iterator[str]:
    """Yield the lines of rest_client_*. parts: of one API server each."""
    parts = tuple(parts)
    name = "rest_client_requests_total"
    yield head_lines(name, "Requests to the API server, watches among them.", "counter")
    for each in parts:
        for (method, code), count in sorted(each.answers.items()):
            labels = label_text(("code", "host", "method"), (code, each.host, method))
            yield f"{name}{{{labels}}} {count}\n"
    for number, (name, text) in enumerate(_DURATIONS):
        yield head_lines(name, text, "histogram")
        for each in parts:
            for verb, counts in sorted(each.verbs.items()):
                labels = label_text(("verb", "host"), (verb, each.host))
                yield from bucket_lines(name, labels, _of(counts)[number])


def _of(counts: VerbCounts) -> tuple[Histogram, ...]:
    return counts.duration, counts.limited, counts.sent, counts.received


def work_queue_lines(queues: Iterable[WorkQueue]) -> Iterator[str]:
    """Yield the lines of workqueue_*."""
    queues = tuple(queues)
    for name, text, kind, value_of in _WORK:
        yield head_lines(f"workqueue_{name}", text, kind)
        for queue in queues:
            yield f"workqueue_{name}{{{_named(queue)}}} {number_text(value_of(queue))}\n"
    name = "workqueue_queue_duration_seconds"
    yield head_lines(name, "From becoming due to being worked on.", "histogram")
    for queue in queues:
        yield from bucket_lines(name, _named(queue), queue.counts.waited)
    name = "workqueue_work_duration_seconds"
    yield head_lines(name, "Work on a key.", "histogram")
    for queue in queues:
        yield from bucket_lines(name, _named(queue), queue.counts.worked)


def _named(queue: WorkQueue) -> str:
    return label_text(("name",), (queue.name,))

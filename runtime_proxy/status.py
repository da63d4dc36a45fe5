"""Serves /metrics, /healthz, /readyz and /status.

/healthz says whether the proxy does its work: its registrations can be read, no hook server makes
calls fail, its journal can be written. /readyz says whether calls reach the runtime. /status shows
the state of each hook server. Counting is plain additions on the hot path; the Prometheus text is
made at a scrape.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from runtime_proxy.stages import Stage
from service.histogram import Histogram
from service.http_server import Handler, Request, Response, Server, json, text

# From the cost of the proxy alone (below 1 ms) over a hook's limit (2 s) to pulls of images.
# Chosen: twice as many bounds double the lines of each method.
_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0)
# A client chooses the path; what is not CRI is counted together.
_KNOWN_PREFIXES = (
    b"/runtime.v1.RuntimeService/",
    b"/runtime.v1.ImageService/",
    b"/runtime.v1alpha2.RuntimeService/",
    b"/runtime.v1alpha2.ImageService/",
)
# Methods with a histogram of their own. Chosen: the two services have below 50 methods, in two
# versions. Twice the value: a client that invents methods makes twice as many series.
_MAX_PATHS = 128
_OTHER = "other"


class Figures:
    """What is counted as it happens."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.calls: dict[bytes, Histogram] = {}
        self.hook_seconds: dict[tuple[str, Stage], Histogram] = {}
        self.hook_calls: dict[tuple[str, Stage, str], int] = {}

    def call_finished(self, path: bytes, started: float) -> None:
        histogram = self.calls.get(path)
        if histogram is None:
            if len(self.calls) >= _MAX_PATHS or not path.startswith(_KNOWN_PREFIXES):
                path = _OTHER.encode()
            histogram = self.calls.setdefault(path, Histogram(_BUCKETS_S))
        histogram.observe(self._clock() - started)

    def hook_called(self, server: str, stage: Stage, outcome: str, seconds: float) -> None:
        key = (server, stage, outcome)
        self.hook_calls[key] = self.hook_calls.get(key, 0) + 1
        self.hook_seconds.setdefault((server, stage), Histogram(_BUCKETS_S)).observe(seconds)


@dataclass(frozen=True, slots=True)
class Gauge:
    name: str
    help: str
    read: Callable[[], float]
    counter: bool = False


class _Exposition(Collector):
    def __init__(self, figures: Figures, gauges: tuple[Gauge, ...]) -> None:
        self._figures = figures
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        calls = HistogramMetricFamily(
            "koord_runtime_proxy_call_duration_seconds",
            "Calls from their first frame to the runtime's last one",
            labels=["service", "method"],
        )
        for path, histogram in sorted(self._figures.calls.items()):
            service, _, method = path.decode("ascii", "replace").lstrip("/").rpartition("/")
            calls.add_metric([service or _OTHER, method], histogram.cumulative(), histogram.sum)
        yield calls
        seconds = HistogramMetricFamily(
            "koord_runtime_proxy_hook_duration_seconds",
            "Time that calls to hook servers took, answered or not",
            labels=["server", "stage"],
        )
        for (server, stage), histogram in sorted(
            self._figures.hook_seconds.items(), key=lambda item: (item[0][0], item[0][1].value)
        ):
            seconds.add_metric([server, stage.value], histogram.cumulative(), histogram.sum)
        yield seconds
        outcomes = CounterMetricFamily(
            "koord_runtime_proxy_hook_calls",
            "Calls to hook servers by outcome: ok, error, timeout, refused (breaker), unserved",
            labels=["server", "stage", "outcome"],
        )
        for (server, stage, outcome), count in self._figures.hook_calls.items():
            outcomes.add_metric([server, stage.value, outcome], count)
        yield outcomes
        for gauge in self._gauges:
            family = CounterMetricFamily if gauge.counter else GaugeMetricFamily
            yield family(gauge.name, gauge.help, value=gauge.read())


def pages(
    figures: Figures,
    gauges: tuple[Gauge, ...],
    *,
    health: Callable[[], list[str]],
    readiness: Callable[[], list[str]],
    status: Callable[[], dict[str, object]],
) -> Server:
    """Return the four pages, not listening yet.

    health, readiness: what is wrong, nothing when all is well. status: JSON values.
    """
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    registry.register(_Exposition(figures, gauges))

    async def metrics(request: Request) -> Response:
        return Response(200, generate_latest(registry), CONTENT_TYPE_LATEST)

    async def state(request: Request) -> Response:
        return json(status())

    def page(look: Callable[[], list[str]]) -> Handler:
        async def answer(request: Request) -> Response:
            troubles = look()
            return text(503, "\n".join(troubles)) if troubles else text(200, "ok")

        return answer

    return Server(
        {
            ("GET", "/metrics"): metrics,
            ("GET", "/status"): state,
            ("GET", "/healthz"): page(health),
            ("GET", "/readyz"): page(readiness),
        }
    )

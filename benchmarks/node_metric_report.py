"""How long the NodeMetric of a full node takes to build.

    python -m benchmarks.node_metric_report [--pods 110] [--rounds 50]

The store has 30 minutes of samples at one second for every series that the report reads. Times are
those of the status with its prediction, and of its JSON.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from apis.decode import encode
from apis.keys import LABEL_QOS_CLASS
from apis.qos import KubeQoS
from benchmarks.quantiles import quantile
from benchmarks.running import run_main
from hooks.subject import Amounts, ContainerSpec, Pod, make_pod
from koordlet.measurement.series import Metric, Series
from koordlet.measurement.store import Store
from koordlet.prediction.models import Models, samples
from koordlet.prediction.peak import Both, Settings, predict
from koordlet.reporters.node_metric import Policy, amounts, measured, node_metric_status

_HALF_AN_HOUR_S = 1800


def pods_of(count: int) -> list[Pod]:
    """Return pods with requests, half of them LS and half BE."""
    amounts_of_pod = Amounts(cpu_request_milli=500, memory_request_bytes=2**30)
    return [
        make_pod(
            namespace="default",
            name=f"app-{number:04d}",
            uid=f"{number:08x}-0000-4000-8000-000000000000",
            labels={LABEL_QOS_CLASS: "BE" if number % 2 else "LS"},
            annotations={},
            kube_qos=KubeQoS.BURSTABLE,
            phase="Running",
            specs=(ContainerSpec("main", amounts=amounts_of_pod),),
        )
        for number in range(count)
    ]


def filled(pods: list[Pod]) -> Store:
    """Return a store with half an hour of samples, the last one at time 0."""
    random = np.random.default_rng(1)
    store = Store()
    tables = {
        "node": [
            *(Series(metric) for metric in (Metric.NODE_CPU, Metric.NODE_MEMORY)),
            *(Series(metric) for metric in (Metric.SYSTEM_CPU, Metric.SYSTEM_MEMORY)),
            *(Series(Metric.NODE_NUMA_CPU, number) for number in "01"),
            *(Series(Metric.NODE_NUMA_MEMORY, number) for number in "01"),
        ],
        "pods": [
            Series(metric, pod.uid)
            for pod in pods
            for metric in (Metric.POD_CPU, Metric.POD_MEMORY)
        ],
    }
    for name, series in tables.items():
        store.add_table(name, interval_s=1.0, retention_s=float(_HALF_AN_HOUR_S))
        for second in range(-_HALF_AN_HOUR_S, 1):
            values = random.gamma(2.0, 1.0, len(series)).tolist()
            store.record(name, float(second), dict(zip(series, values, strict=True)))
    return store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pods", type=int, default=110)
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    pods = pods_of(options.pods)
    store = filled(pods)
    models, policy = Models(), Policy()
    for _ in range(800):
        models.train(samples(store.view(0.0), pods, (), interval_s=60.0), 1_700_000_000.0)
    listed = [(pod, False) for pod in pods]
    building, encoding, predicting = [], [], []
    size = 0
    for _ in range(options.rounds):
        view = store.view(0.0)
        started = time.perf_counter()
        predicted = predict(
            models,
            listed,
            allocatable=Both(128_000, 2**40),
            settings=Settings(),
            wall_s=1_700_000_000.0,
            measured=measured(view, within_s=policy.aggregate_s),
        ).careful
        free, peak = predicted.reclaimable, predicted.peak
        after = time.perf_counter()
        status = node_metric_status(
            view,
            pods,
            (),
            policy,
            wall_s=1_700_000_000.0,
            reclaimable=amounts(free.cpu_milli, free.memory_bytes),
            peak=amounts(peak.cpu_milli, peak.memory_bytes),
        )
        built = time.perf_counter()
        size = len(encode(status))
        encoded = time.perf_counter()
        predicting.append(after - started)
        building.append(built - after)
        encoding.append(encoded - built)
    for what, times in (("status", building), ("prediction", predicting), ("JSON", encoding)):
        print(
            f"{options.pods} pods, {what}: median {quantile(times, 0.5) * 1000:.2f} ms, "
            f"p99 {quantile(times, 0.99) * 1000:.2f} ms"
        )
    print(f"{size / 1024:.1f} KiB of JSON")


if __name__ == "__main__":
    run_main(main)

"""How long the models of prediction take to learn and to answer.

    python -m benchmarks.prediction_update [--models 2500] [--rounds 200]

A model has two histograms, of CPU and of memory, so 2,500 models are 5,000 histograms.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import numpy as np

from benchmarks.quantiles import quantile
from benchmarks.running import run_main
from koordlet.prediction import checkpoints
from koordlet.prediction.models import Models, Use

_START_S = 1_700_000_000.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", type=int, default=2500)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    random = np.random.default_rng(1)
    keys = [f"{number:08x}-pod" for number in range(options.models)]
    models = Models()
    training, asking = [], []
    for step in range(options.rounds):
        cores = random.gamma(2.0, 1.0, options.models).tolist()
        used = (random.gamma(2.0, 1.0, options.models) * 2**30).tolist()
        uses = {key: Use(c, m) for key, c, m in zip(keys, cores, used, strict=True)}
        started = time.perf_counter()
        models.train(uses, _START_S + 60 * step)
        training.append(time.perf_counter() - started)
        if step % 10 == 0:
            started = time.perf_counter()
            models.peaks(keys, cpu_fraction=0.95, memory_fraction=0.98)
            asking.append(time.perf_counter() - started)
    for what, times in (("one sample into all", training), ("percentiles of all", asking)):
        print(
            f"{2 * options.models} histograms, {what}: "
            f"median {quantile(times, 0.5) * 1000:.1f} ms, "
            f"p99 {quantile(times, 0.99) * 1000:.1f} ms"
        )
    with tempfile.TemporaryDirectory() as directory:
        started = time.perf_counter()
        checkpoints.write(directory, models.save())
        print(f"checkpoint of all written in {(time.perf_counter() - started) * 1000:.0f} ms")
        started = time.perf_counter()
        loaded = checkpoints.read(directory)
        print(
            f"{len(loaded.models)} models read in {(time.perf_counter() - started) * 1000:.0f} ms"
        )


if __name__ == "__main__":
    run_main(main)

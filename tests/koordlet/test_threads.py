"""The threads of the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_COUNT = "import os, koordlet.measurement.store; print(len(os.listdir('/proc/self/task')))"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs: one thread for each")
def test_numpy_starts_no_thread_for_each_cpu() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", _COUNT], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n"

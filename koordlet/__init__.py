"""The node daemon: state, reconciler, executor, sources, endpoints, configuration."""

import os
from typing import Final

VERSION: Final = "0.1.0"

# NumPy's OpenBLAS would start a thread for each CPU at its import, though nothing here uses it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

"""The node daemon: state, reconciler, executor, sources, endpoints, configuration."""

from typing import Final

VERSION: Final = "0.1.0"

"""The limit of open files of a daemon: raised to what the system allows.

The soft limit is 1024 by default, for programs that still use select(2), which
takes no larger descriptor. A daemon that reaches it cannot accept connections or read files.
"""

from __future__ import annotations

import logging
import resource

_LOG = logging.getLogger(__name__)


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one; return what holds now.

    Child processes inherit it. None of ours uses select.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        # The hard limit may be above what a container's sandbox lets a process ask for.
        _LOG.warning("open files stay limited to %d: %s", soft, error)
        return soft
    return hard

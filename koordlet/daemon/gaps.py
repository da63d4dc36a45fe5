"""The gaps between a runtime's calls, in which background threads work during a burst of new pods.

A runtime that has taken the reply to RunPodSandbox is busy itself before it creates the pod's first
container. What the reconciler does then delays no call. Outside of these gaps a creation that meets
it waits for the interpreter and for the CPU, and the runtime's thread for both. A pass over many
pods would meet several, and a round of measurements one.

While pods appear less than 40 ms apart, the reconciler and the sampling thread therefore work in
the gaps alone. Their work may take up to 20 times as long, but not much longer than the burst:
without a new pod for 40 ms it goes on as always. So it does for a pod that appears alone, once many
pods wait for the reconciler (`Passes`), and in a round of measurements that has taken long.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Final

_GAP_S: Final = 0.002
"""How long a gap lasts. Chosen: runtimes create a container 5 ms or more after its sandbox, and the
gap begins 1 ms after the reply. Twice the value meets CreateContainer."""
_BURST_S: Final = 0.04
"""New pods that are closer together are a burst. It goes on for as long after its last new pod, and
so work rests for as long at a time. Chosen: as long as changes of pods are gathered at most. Twice
the value doubles the time that a repair takes during a burst in which pods come that seldom."""


class Gaps:
    """`begin` is called by the event loop, `wait` by background threads."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds that never go back."""
        self._clock = clock
        self._began_at = -math.inf
        self._in_burst = False
        self._began = threading.Event()
        """Set, and replaced by a new one, when a gap begins."""

    def begin(self) -> None:
        """A new pod's gap begins. Never blocks."""
        now = self._clock()
        self._in_burst = now - self._began_at < _BURST_S
        self._began_at = now
        began, self._began = self._began, threading.Event()
        began.set()

    def wait(self) -> bool:
        """Outside of a gap, wait for the next one or the burst's end; return whether it waited.

        Only the event loop begins a gap, so a loop that waits for this thread is held up by one
        such wait at most: then the burst is over.
        """
        # Before the look at the time: a gap that begins in between must not be missed.
        began = self._began
        since_s = self._clock() - self._began_at
        if not self._in_burst or not _GAP_S <= since_s < _BURST_S:
            return False
        began.wait(_BURST_S - since_s)
        return True

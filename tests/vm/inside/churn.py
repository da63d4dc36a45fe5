"""Pods that come and go under a NodeSLO that flips, until the power is cut."""

from __future__ import annotations

import sys

from tests.e2e.manifests import batch_pod, nodeslo
from tests.vm.inside.node import node
from tests.vm.inside.service import BE_IDLE, LS_PROTECTED, installed
from tests.vm.session import say


def main() -> int:
    with node() as machine, installed() as service:
        for number in range(1000):
            classes = {"beClass": BE_IDLE} if number % 2 else {"lsClass": LS_PROTECTED}
            service.put(nodeslo(**classes))
            pod = machine.run_pod(batch_pod(f"churn-{number}"))
            say(f"round {number}")
            if number % 3:
                machine.remove(pod)
    return 0


if __name__ == "__main__":
    sys.exit(main())

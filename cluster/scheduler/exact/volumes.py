"""Which persistent volumes the unbound claims of one pod get on one node.

The smallest claim chooses first, and takes the smallest volume that is left and large enough;
equal ones in the order of their names. A volume that refers to the claim is the only choice.
Source: kube-scheduler's volume binding; docs/facts/scheduler.md, "Volumes".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def match_claims(choices: Mapping[str, Sequence[str]]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return (claim -> volume, claims for which no volume is left).

    choices: claims by key in the order in which they choose, each with the names of the volumes
    that it can be bound to on this node, best first.
    """
    taken: dict[str, str] = {}
    unmatched = []
    used: set[str] = set()
    for claim, volumes in choices.items():
        best = next((name for name in volumes if name not in used), None)
        if best is None:
            unmatched.append(claim)
        else:
            taken[claim] = best
            used.add(best)
    return taken, tuple(unmatched)

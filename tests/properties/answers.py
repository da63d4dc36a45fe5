"""A decision as the runtime carries it out: what it writes into a container's files."""

from __future__ import annotations

from hooks.decision import Decision
from linux.resources import Resource
from tests.simulated import Profile
from tests.simulated.kubelet import linear_weight, quadratic_weight
from tests.simulated.profiles import WeightFormula


def files_of(decision: Decision, may: frozenset[Resource], profile: Profile) -> dict[str, str]:
    """File name -> text, for what the runtime's generation takes from an answer."""
    v2 = profile.cgroup == 2
    weight = quadratic_weight if profile.weights is WeightFormula.QUADRATIC else linear_weight
    files: dict[str, str] = {}
    for (resource, _), outcome in decision.outcomes.items():
        value = outcome.value
        if resource not in may:
            continue
        match resource, value:
            case Resource.CPU_SHARES, int(number):
                files |= {"cpu.weight": str(weight(number))} if v2 else {"cpu.shares": str(number)}
            case Resource.CPU_CFS_QUOTA, int(number) if v2:
                files["cpu.max"] = f"{'max' if number < 0 else number} 100000"
            case Resource.CPU_CFS_QUOTA, int(number):
                files["cpu.cfs_quota_us"] = str(number)
            case Resource.MEMORY_LIMIT, int(number) if v2:
                files["memory.max"] = "max" if number < 0 else str(number)
            case Resource.MEMORY_LIMIT, int(number):
                files["memory.limit_in_bytes"] = str(number)
            case Resource.CPUSET_CPUS, _:
                files["cpuset.cpus"] = str(value)
            case ((Resource.MEMORY_MIN | Resource.MEMORY_LOW | Resource.MEMORY_HIGH), int(n)):
                if v2:
                    files[resource.value] = "max" if n < 0 or n >= 1 << 62 else str(n)
            case _:
                pass
    return files

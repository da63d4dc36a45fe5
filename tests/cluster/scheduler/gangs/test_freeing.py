"""The node that costs the least to free, while evictions use up budgets."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from cluster.scheduler.cycle.freeing import FreeingCosts
from cluster.scheduler.cycle.victim_columns import Costs, by_amounts
from cluster.scheduler.cycle.victims import Candidate, by_amounts_on, default_victims
from tests.cluster.scheduler.preemption.making import Bed
from tests.cluster.scheduler.preemption.oracle import OracleBudgets, OracleNode, OraclePod

_NODES = 120
_MEMBERS = 40
_REQUESTED = [("cpu", 500)]


@pytest.mark.parametrize("seed", range(4))
def test_the_cheapest_node_is_found_with_few_nodes_worked_out_one_by_one(seed: int) -> None:
    random = Random(seed)
    bed = Bed(
        [
            OracleNode(
                f"n{node}",
                1000,
                9,
                tuple(
                    OraclePod(
                        f"p{node}-{at}",
                        random.choice((0, 1)),
                        250,
                        start=float(random.randrange(3)),
                        app=random.choice("aab"),
                    )
                    for at in range(4)
                ),
            )
            for node in range(_NODES)
        ],
        OracleBudgets(allowed={"a": 25, "b": random.choice((0, 10))}),
    )
    tables, budgets = bed.tables, bed.budgets
    member = bed.pending(OraclePod("member", 5, 500))
    every = np.arange(_NODES)
    ties = np.array([random.getrandbits(64) for _ in every], dtype=np.uint64)
    worked_out: list[int] = []

    def one(row: int) -> Candidate | None:
        worked_out.append(row)
        return by_amounts_on(tables, member, row, _REQUESTED, default_victims, budgets)

    def all_costs() -> Costs:
        return by_amounts(tables, member, every, _REQUESTED, default_victims, budgets)

    costs = FreeingCosts(tables, all_costs, one, ties)
    for number in range(_MEMBERS):
        where = np.array([random.random() < 0.8 for _ in every])
        worked_out.clear()
        found = costs.cheapest(where)
        assert len(worked_out) <= 32
        now = all_costs()
        least = next(int(at) for at in now.order(ties[now.rows]) if where[now.rows[at]])
        assert found is not None
        assert found.candidate == now.candidate(least, tables)
        for victim in found.candidate.victims:
            tables.remove(victim.uid)
            budgets.spend(victim)
        tables.place(
            bed.booking(OraclePod(f"m{number}", 5, 500), tables.nodes.name(found.candidate.row))
        )
        costs.budgets_changed()
        costs.changed(found.candidate.row)

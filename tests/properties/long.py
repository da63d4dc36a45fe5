"""The long run: `python -m tests.properties.long --examples 10000`.

Runs every state machine of this folder with that many examples in total and says what came of it.
A failure is shrunk and printed as a script; exit status 1.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.properties.disturbed_machine import DisturbedMachine
from tests.properties.edited_machine import EditedMachine
from tests.properties.measured_machine import MeasuredMachine
from tests.properties.node_machine import NodeMachine

MACHINES = (NodeMachine, DisturbedMachine, EditedMachine, MeasuredMachine)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=10_000, help="in total (%(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="of each (%(default)s)")
    parser.add_argument(
        "--machine", choices=[machine.__name__ for machine in MACHINES], help="only this one"
    )
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    machines = [machine for machine in MACHINES if arguments.machine in (None, machine.__name__)]
    failed = False
    for machine in machines:
        examples = arguments.examples // len(machines)
        started = time.monotonic()
        try:
            run_state_machine_as_test(
                machine,
                settings=settings(
                    max_examples=examples,
                    stateful_step_count=arguments.steps,
                    deadline=None,
                    database=None,
                    suppress_health_check=list(HealthCheck),
                ),
            )
        except Exception:  # noqa: BLE001 - the failure is the result, and is printed whole
            traceback.print_exc()
            failed = True
        took = time.monotonic() - started
        result = "a failure, see above" if failed else "nothing found"
        print(f"{machine.__name__}: {examples} examples, {took:.0f} s: {result}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

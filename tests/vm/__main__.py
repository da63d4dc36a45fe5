"""`python -m tests.vm`: build the image, boot it, run a pytest selection inside."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from tests.beds.errors import BedError
from tests.vm.image import CACHE, KERNELS, built
from tests.vm.machine import BootError, booted, pytest_session
from tests.vm.topology import TOPOLOGIES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.vm", description=__doc__)
    parser.add_argument("--topology", choices=sorted(TOPOLOGIES), default="2s2c2t")
    parser.add_argument("--kernel", choices=KERNELS, default="bookworm", help="of that Debian")
    parser.add_argument("--timeout", type=float, default=360.0, help="seconds for the tests")
    parser.add_argument("--results", type=Path, default=CACHE / "results")
    parser.add_argument("--build", action="store_true", help="build the image and stop")
    parser.add_argument("selection", nargs="*", default=["tests/behaviours", "tests/vm/inside"])
    options, further = parser.parse_known_args()
    try:
        if options.build:
            print(built(options.kernel).disk)
            return 0
        start = time.monotonic()
        with booted(
            pytest_session(*options.selection, *further),
            topology=TOPOLOGIES[options.topology],
            kernel=options.kernel,
        ) as machine:
            print(f"vm: up after {time.monotonic() - start:.0f} s", flush=True)
            try:
                status = machine.finish(options.timeout)
            finally:
                options.results.mkdir(parents=True, exist_ok=True)
                shutil.copy(machine.log, options.results / "console.txt")
            machine.fetch_results(options.results)
    except (BedError, BootError) as error:
        print(f"vm: {error}", file=sys.stderr)
        return 2
    print((options.results / "output.txt").read_text(errors="replace"))
    print(f"vm: {options.topology} done in {time.monotonic() - start:.0f} s: {options.results}")
    return status


if __name__ == "__main__":
    sys.exit(main())

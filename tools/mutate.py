"""Plants random faults in modules and counts how many of them the tests notice.

    python -m tools.mutate cluster --sample 100 --seed 7
    python -m tools.mutate cluster/ratios.py cluster/webhook --tests tests/cluster tests/kube
    python -m tools.mutate cluster/ratios.py:14             one line, after its test was written
    python -m tools.mutate runtime_proxy -- -m "not long" -k "not dockerd"
    python -m tools.mutate cluster --sample 100 --seed 7 --list

Each mutant is the checkout with one small fault: `<` for `<=`, a constant off by one, a condition,
statement or argument left out, ... (tools/mutants.py). A mutant that fails a test is killed; one
that passes all of them survives, and is shown as a diff at the end. A survivor asks for a test, or
for the removal of code that makes no difference. Some survivors change nothing that can be
observed (equivalent mutants): a few percent of a sample.

The tests run in a copy of the checkout, so that it can be edited meanwhile. They are the test
folders of the rooms that are mutated. A mutant is tried in two stages: the test files that import
its module, then, if it passed these, all others, the quickest first. So one run also measures
modules that only tests of a whole process notice, and such tests, which take long, run for few
mutants. A test of the second stage that failed is repeated: on a busy machine one may fail by
chance. A killed mutant is listed with the test that failed. What follows `--` goes to pytest.
Unless that has an `-m`, tests that start a machine of their own (containerd, an API server, QEMU)
are left out. The same arguments on the same source give the same mutants.
"""

from __future__ import annotations

import argparse
import math
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tools.mutants import Edit, Site, diff, is_a_change, sites

ROOT = Path(__file__).resolve().parent.parent
# A mutant may loop for ever. Four times what the tests need without a fault leaves room for a
# machine that is busier now; the floor covers selections that end at once.
TIMEOUT_FACTOR = 4
SHORTEST_TIMEOUT_S = 60.0
# How long tests that were ended may take to stop what they started (containerd, an API server).
CLEAN_UP_S = 20.0
# Minutes for each mutant: only on request.
WITHOUT_MACHINES = ("-m", "not (containerd or apiserver or kubelet or vm or long)")
# What pytest exits with when it found no test.
NO_TESTS = 5


class UsageError(Exception):
    """What was asked for cannot be done; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: `path` is relative to the checkout, `source` the module without the fault."""

    path: str
    line: int
    edit: Edit
    source: bytes

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.edit.kind}"


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a mutant: "killed", "survived" or "timed out", after some seconds.

    killer: the test that failed; empty if none did, or if pytest itself ended.
    """

    mutant: Mutant
    outcome: str
    seconds: float
    killer: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    split = given.index("--") if "--" in given else len(given)
    options = _parser().parse_args(given[:split])
    try:
        return _run(options, given[split + 1 :])
    except UsageError as error:
        print(f"mutate: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutate",
        usage="python -m tools.mutate PATH[:LINE] ... [options] [-- pytest arguments]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="+", metavar="PATH[:LINE]", help="room, folder or module")
    parser.add_argument("--sample", type=int, metavar="N", help="this many mutants (default: all)")
    parser.add_argument("--seed", type=int, help="which mutants (default: others each time)")
    parser.add_argument(
        "--tests", nargs="+", metavar="TESTS", help="test folders, files or node ids"
    )
    parser.add_argument(
        "--jobs", type=int, choices=(1, 2), default=1, help="copies to work in (default: 1)"
    )
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="seconds for each stage (default: by the tests)"
    )
    parser.add_argument(
        "--at-least", type=float, metavar="PERCENT", help="exit 1 if fewer are killed"
    )
    parser.add_argument("--list", action="store_true", help="show the mutants and run nothing")
    return parser


def _run(options: argparse.Namespace, pytest_arguments: Sequence[str]) -> int:
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    modules = modules_at(ROOT, options.paths)
    mutants = sample(ROOT, modules, count=options.sample, seed=seed)
    if not mutants:
        raise UsageError(f"nothing to mutate at {' '.join(options.paths)}")
    print(f"{len(mutants)} mutants of {len(modules)} modules, --seed {seed}", flush=True)
    if options.list:
        for mutant in mutants:
            print(f"\n{diff(mutant.path, mutant.source, mutant.edit)}", end="")
        return 0
    if not any(one.startswith("-m") for one in pytest_arguments):
        pytest_arguments = [*WITHOUT_MACHINES, *pytest_arguments]
    tests = test_files(ROOT, options.tests or tests_of(ROOT, modules))
    begin = time.monotonic()
    results: list[Result] = []
    with ExitStack() as stack:
        copies = [stack.enter_context(copy_of(ROOT)) for _ in range(options.jobs)]
        pace = try_without_fault(copies[0], [*pytest_arguments, *tests], options.timeout)
        print(f"no fault: the tests pass in {pace.seconds(tests):.1f} s", flush=True)
        trial = Trial(tests, pytest_arguments, pace, options.timeout, threading.Event())
        for result in try_all(copies, mutants, trial):
            results.append(result)
            count = f"[{len(results):{len(str(len(mutants)))}}/{len(mutants)}]"
            by = f"  by {result.killer}" if result.killer else ""
            print(
                f"{count} {result.outcome:9} {result.seconds:6.1f} s  {result.mutant}{by}",
                flush=True,
            )
    report(results, time.monotonic() - begin)
    rate = 100 * sum(one.outcome != "survived" for one in results) / len(results)
    return 1 if options.at_least is not None and rate < options.at_least else 0


def modules_at(root: Path, paths: Sequence[str]) -> dict[str, set[int]]:
    """Return the modules below the paths, each with the lines asked for (none: all lines).

    Generated modules are left out. Raises UsageError for a path without modules.
    """
    found: dict[str, set[int]] = {}
    for path in paths:
        name, _, line = path.partition(":")
        if line and not line.isdecimal():
            raise UsageError(f"{path}: {line} is not a line number")
        place = root / name
        files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
        modules = [one for one in files if not re.search(r"_pb2(_grpc)?\.py$|/build/", str(one))]
        if not modules or not all(one.is_file() for one in modules):
            raise UsageError(f"{path}: no Python modules there")
        for module in modules:
            lines = found.setdefault(str(module.resolve().relative_to(root)), set())
            if line:
                lines.add(int(line))
    return found


def sample(
    root: Path, modules: dict[str, set[int]], *, count: int | None, seed: int
) -> list[Mutant]:
    """Return `count` mutants of the modules, one a place; all mutants of all places if None.

    Places are drawn, not mutants: a comparison that can be wrong in three ways counts once.
    """
    sources = {path: (root / path).read_bytes() for path in sorted(modules)}
    places: list[tuple[str, Site]] = [
        (path, site)
        for path, source in sources.items()
        for site in sites(source)
        if not modules[path] or site.line in modules[path]
    ]
    if count is None:
        drawn = [(path, site, list(site.edits)) for path, site in places]
    else:
        chance = random.Random(seed)
        chance.shuffle(places)
        drawn = [(path, site, chance.sample(site.edits, len(site.edits))) for path, site in places]
    mutants: list[Mutant] = []
    for path, site, edits in drawn:
        source = sources[path]
        good = [edit for edit in edits if is_a_change(source, edit)]
        if count is not None:
            good = good[:1]
        mutants += [Mutant(path, site.line, edit, source) for edit in good]
        if count is not None and len(mutants) == count:
            break
    return mutants


def tests_of(root: Path, modules: dict[str, set[int]]) -> list[str]:
    """Return the test folders that mirror the modules' rooms. Raises UsageError."""
    rooms = sorted({Path(module).parts[0] for module in modules})
    folders = [f"tests/{room}" for room in rooms]
    if missing := [one for one in folders if not (root / one).is_dir()]:
        raise UsageError(f"there is no {missing[0]}: name the tests with --tests")
    return folders


def test_files(root: Path, selection: Sequence[str]) -> list[str]:
    """Return the selection with each folder replaced by its test files. Raises UsageError."""
    found: list[str] = []
    for one in selection:
        place = root / one.partition("::")[0]
        if not place.exists():
            raise UsageError(f"{one}: no such tests")
        if place.is_dir():
            found += [str(file.relative_to(root)) for file in sorted(place.rglob("test_*.py"))]
        else:
            found.append(one)
    return list(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class Pace:
    """How long the tests take without a fault: the start of pytest, and each test file.

    of_file: seconds by the path of a file; a file of which no test ran is not in it.
    """

    start_s: float
    of_file: Mapping[str, float]

    def seconds(self, tests: Sequence[str]) -> float:
        files = {test.partition("::")[0] for test in tests}
        return self.start_s + sum(self.of_file.get(file, 0.0) for file in files)


def stages(
    root: Path, tests: Sequence[str], module: str, pace: Pace
) -> tuple[list[str], list[str]]:
    """Return the tests that import the module, and the others; the quickest files first."""
    dotted = module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    package, _, name = dotted.rpartition(".")
    imports = re.compile(
        rf"^\s*(?:from {re.escape(dotted)} import|import {re.escape(dotted)}\b"
        + (rf"|from {re.escape(package)} import .*\b{name}\b)" if package else ")"),
        re.MULTILINE,
    )
    near: list[str] = []
    others: list[str] = []
    for test in sorted(tests, key=lambda one: pace.of_file.get(one.partition("::")[0], 0.0)):
        text = (root / test.partition("::")[0]).read_text()
        (near if imports.search(text) else others).append(test)
    return near, others


@contextmanager
def copy_of(root: Path) -> Iterator[Path]:
    """Give a copy of the checkout: what git tracks or would track, compiled, and the caches."""
    folder = Path(tempfile.mkdtemp(prefix="koord-mutate-"))
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            capture_output=True,
            check=True,
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (root / name).is_file() and not name.startswith((".cache", ".venv")):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name)
        (root / ".cache").mkdir(exist_ok=True)
        (folder / ".cache").symlink_to((root / ".cache").resolve())
        # Compared by content: a mutant may have the size and the time, in seconds, of the original.
        compiling = ["-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "."]
        subprocess.run([sys.executable, *compiling], cwd=folder, check=True)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Trial:
    """How each mutant is tried: with these tests, at this pace, until `stopped` is set.

    limit_s: the most seconds for one stage; None: as TIMEOUT_FACTOR says.
    """

    tests: Sequence[str]
    pytest_arguments: Sequence[str]
    pace: Pace
    limit_s: float | None
    stopped: threading.Event

    def limit_of(self, tests: Sequence[str]) -> float:
        """Return the most seconds that these tests may take."""
        return self.limit_s or max(SHORTEST_TIMEOUT_S, TIMEOUT_FACTOR * self.pace.seconds(tests))


def try_all(copies: Sequence[Path], mutants: Sequence[Mutant], trial: Trial) -> Iterator[Result]:
    """Try each mutant, as many at a time as there are copies; give results as they come."""
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def tried(mutant: Mutant) -> Result:
        copy = free.get()
        try:
            return try_one(copy, mutant, trial)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        waiting = [pool.submit(tried, mutant) for mutant in mutants]
        try:
            for done in as_completed(waiting):
                yield done.result()
        finally:
            trial.stopped.set()
            pool.shutdown(cancel_futures=True)


def try_one(copy: Path, mutant: Mutant, trial: Trial) -> Result:
    """Plant the fault in the copy, run the tests until one fails, take the fault out again."""
    begin = time.monotonic()
    outcome, killer = "survived", ""
    module = copy / mutant.path
    module.write_bytes(mutant.edit.apply(mutant.source))
    try:
        near, others = stages(copy, trial.tests, mutant.path, trial.pace)
        if near:
            outcome, killer = _outcome(copy, near, trial)
        if outcome == "survived" and others:
            outcome, killer = _outcome(copy, others, trial)
            # Tests of whole processes may fail by chance on a busy machine: one that passes when
            # it is repeated has not noticed the fault.
            if killer and _outcome(copy, [killer], trial)[0] == "survived":
                outcome, killer = _outcome(copy, others, trial)
    finally:
        module.write_bytes(mutant.source)
    return Result(mutant, outcome, time.monotonic() - begin, killer)


def _outcome(copy: Path, tests: Sequence[str], trial: Trial) -> tuple[str, str]:
    """Run tests until one fails. Return the outcome of a `Result`, and the test that failed."""
    arguments = ["-x", *trial.pytest_arguments, *tests]
    status, output = run_pytest(copy, arguments, trial.limit_of(tests), trial.stopped)
    if status is None:
        return "timed out", ""
    if status in (0, NO_TESTS):
        return "survived", ""
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE)
    return "killed", failed[1] if failed else ""


def try_without_fault(copy: Path, arguments: Sequence[str], limit_s: float | None) -> Pace:
    """Return how long the tests take. Raises UsageError if one fails."""
    begin = time.monotonic()
    record = copy / "pace.xml"
    # In this family a test case names its file; "total" counts fixtures in.
    recording = [f"--junitxml={record}", "-o", "junit_family=xunit1"]
    recording += ["-o", "junit_duration_report=total"]
    limit = limit_s or math.inf
    status, output = run_pytest(copy, [*recording, *arguments], limit, threading.Event())
    needed_s = time.monotonic() - begin
    if status is None:
        raise UsageError(f"the tests take longer than {limit_s:g} s without any fault")
    if status != 0:
        reason = "find no test" if status == NO_TESTS else "fail without any fault"
        raise UsageError(f"the tests {reason}:\n{output[-3000:]}")
    of_file: defaultdict[str, float] = defaultdict(float)
    for case in ElementTree.parse(record).iter("testcase"):
        of_file[case.attrib["file"]] += float(case.attrib["time"])
    record.unlink()
    return Pace(max(0.0, needed_s - sum(of_file.values())), dict(of_file))


def run_pytest(
    copy: Path, arguments: Sequence[str], limit_s: float, stopped: threading.Event
) -> tuple[int | None, str]:
    """Run pytest in a copy. Return its exit status (None if it ran too long) and its output."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),  # before an editable installation of the checkout itself
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=copy,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + limit_s
        try:
            while process.poll() is None and time.monotonic() < deadline:
                if stopped.wait(0.05):
                    break
            status = process.poll()
        finally:
            end(process)
        output.seek(0)
        return status, output.read().decode(errors="replace")


def end(process: subprocess.Popen[bytes]) -> None:
    """End the tests, with time to clean up, and whatever is left in their session."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(CLEAN_UP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def report(results: Sequence[Result], seconds: float) -> None:
    """Print each survivor as a diff, a line for each module, and the rate."""
    survivors = [one.mutant for one in results if one.outcome == "survived"]
    for mutant in sorted(survivors, key=lambda one: (one.path, one.line)):
        print(f"\nsurvived: {mutant}\n{diff(mutant.path, mutant.source, mutant.edit)}", end="")
    tried = Counter(one.mutant.path for one in results)
    survived = Counter(mutant.path for mutant in survivors)
    width = max(map(len, tried))
    print(f"\n{'module':{width}}  mutants  survived")
    for path, count in sorted(tried.items()):
        print(f"{path:{width}}  {count:7}  {survived[path] or '':>8}")
    killed = len(results) - len(survivors)
    late = sum(one.outcome == "timed out" for one in results)
    print(
        f"\nkilled {killed} of {len(results)} mutants ({100 * killed / len(results):.0f} %),"
        f" {late} of them by running too long, in {seconds:.0f} s"
    )


if __name__ == "__main__":
    # Ending it from outside is like Ctrl-C: the tests end and the copies go.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())

"""Models survive a restart, a torn file costs what is torn, and upstream's files are read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apis.qos import PriorityClass
from koordlet.measurement.series import Metric, Series
from koordlet.prediction import checkpoints
from koordlet.prediction.models import NODE, Models, Use, class_key
from koordlet.prediction.training import Schedule, Trainer
from tests.koordlet.measured import Measured
from tests.koordlet.prediction.pods import GIB, HOUR, NOW, pod


def trained(keys: int = 3) -> Models:
    models = Models()
    for step in range(200):
        uses = {f"pod-{n}": Use(n + step / 100, (n + 1) * GIB) for n in range(keys)}
        models.train(uses, NOW + 60 * step)
    return models


def restored(directory: Path, now_s: float = NOW + 20_000) -> tuple[Models, tuple[str, ...]]:
    models = Models()
    loaded = checkpoints.read(str(directory))
    for saved in loaded.models:
        models.restore(saved, now_s)
    return models, loaded.problems


def peaks(models: Models, keys: int = 3) -> list[tuple[int, int]]:
    names = [f"pod-{n}" for n in range(keys)]
    found = models.peaks(names, cpu_fraction=0.95, memory_fraction=0.98)
    return [
        (int(found[name].cpu_cores * 1000), int(found[name].memory_bytes))
        for name in names
        if name in found
    ]


def test_a_restart_keeps_percentiles_and_counts(tmp_path: Path) -> None:
    models = trained()
    checkpoints.write(str(tmp_path / "new"), models.save())
    again, problems = restored(tmp_path / "new")
    assert problems == ()
    assert peaks(again) == peaks(models)
    assert again.samples_of("pod-1") == 200
    assert os.listdir(tmp_path / "new") == [checkpoints.FILE]


def test_later_samples_weigh_the_same_after_a_restart(tmp_path: Path) -> None:
    models = trained()
    checkpoints.write(str(tmp_path), models.save())
    again, _ = restored(tmp_path)
    for each in (models, again):
        for step in range(60):
            each.train({"pod-0": Use(20.0, GIB)}, NOW + 24 * HOUR + 60 * step)
    assert peaks(again) == peaks(models)


def test_a_missing_directory_has_no_models_and_no_problem(tmp_path: Path) -> None:
    assert checkpoints.read(str(tmp_path / "none")) == checkpoints.Loaded()


@pytest.mark.parametrize("cut", [2, 200, 900])
def test_a_torn_file_costs_the_torn_models_only(tmp_path: Path, cut: int) -> None:
    models = trained()
    checkpoints.write(str(tmp_path), models.save())
    path = tmp_path / checkpoints.FILE
    path.write_bytes(path.read_bytes()[:-cut])
    again, problems = restored(tmp_path)
    kept = len(again)
    assert kept < 3
    assert peaks(again) == peaks(models)[:kept]
    assert len(problems) == 1
    assert "damaged" in problems[0]


def test_a_damaged_line_is_left_out_and_reported(tmp_path: Path) -> None:
    models = trained()
    checkpoints.write(str(tmp_path), models.save())
    path = tmp_path / checkpoints.FILE
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b'"UID"', b'"uid"')
    path.write_bytes(b"".join(lines))
    again, problems = restored(tmp_path)
    assert (again.samples_of("pod-0"), again.samples_of("pod-1")) == (200, 0)
    assert "1 damaged lines" in problems[0]


def test_a_file_of_another_format_is_reported(tmp_path: Path) -> None:
    (tmp_path / checkpoints.FILE).write_text("something else\n")
    models, problems = restored(tmp_path)
    assert len(models) == 0
    assert "not a file of this version" in problems[0]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    checkpoints.write(str(tmp_path), trained().save())
    before = (tmp_path / checkpoints.FILE).read_bytes()

    def broken() -> object:
        yield from trained(1).save()
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        checkpoints.write(str(tmp_path), broken())  # type: ignore[arg-type]
    assert (tmp_path / checkpoints.FILE).read_bytes() == before
    assert os.listdir(tmp_path) == [checkpoints.FILE]


def upstream(uid: str = "abc", **changes: object) -> dict[str, object]:
    histogram = {
        "referenceTimestamp": "2023-11-14T12:00:00Z",
        "bucketWeights": {"32": 10000},
        "totalWeight": 1500.0,
    }
    return {
        "UID": uid,
        "CPU": histogram,
        "Memory": {**histogram, "bucketWeights": {"76": 10000, "10": 20}},
        "LastUpdated": "2023-11-14T22:13:20Z",
        **changes,
    }


def test_upstreams_files_are_read_and_named_by_the_file(tmp_path: Path) -> None:
    for name in ("abc", "__node__", "__node-koord-prod__"):
        (tmp_path / name).write_text(json.dumps(upstream("ignored")))
    (tmp_path / "abc.tmp").write_text("{")
    models, problems = restored(tmp_path, NOW)
    assert problems == ()
    known = models.peaks(
        ("abc", NODE, class_key(PriorityClass.PROD)), cpu_fraction=0.95, memory_fraction=0.98
    )
    assert len(known) == 3
    assert int(known["abc"].cpu_cores * 1000) == 2001
    # 1500 at the reference is 833 samples at the weight of the last one, ten hours later.
    assert models.samples_of("abc") == int(1500 * 2 ** -(36800 / 43200))


def test_our_own_file_wins_over_upstreams(tmp_path: Path) -> None:
    (tmp_path / "abc").write_text(json.dumps(upstream()))
    checkpoints.write(str(tmp_path), trained().save())
    models, problems = restored(tmp_path)
    assert (len(models), problems) == (3, ())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not a checkpoint"),
        ("[]", "not a checkpoint"),
        (json.dumps(upstream(LastUpdated=None)), "LastUpdated is missing"),
        (json.dumps(upstream(LastUpdated="yesterday")), "LastUpdated: 'yesterday'"),
        (json.dumps(upstream(Samples=-1)), "Samples: -1 is negative"),
        (json.dumps(upstream(CPU={})), "CPU.referenceTimestamp is missing"),
        (
            json.dumps(
                upstream(
                    CPU={
                        "referenceTimestamp": "2023-11-14T12:00:00Z",
                        "bucketWeights": {"158": 1},
                        "totalWeight": 1,
                    }
                )
            ),
            "CPU.bucketWeights: '158' is not a bucket of 158",
        ),
        (
            json.dumps(
                upstream(
                    CPU={
                        "referenceTimestamp": "2023-11-14T12:00:00Z",
                        "bucketWeights": {"1": -1},
                        "totalWeight": 1,
                    }
                )
            ),
            "CPU.bucketWeights[1]: -1 is negative",
        ),
    ],
)
def test_a_bad_file_of_upstream_is_reported_and_the_others_hold(
    tmp_path: Path, text: str, problem: str
) -> None:
    (tmp_path / "bad").write_text(text)
    (tmp_path / "good").write_text(json.dumps(upstream()))
    models, problems = restored(tmp_path)
    assert (models.samples_of("good") > 0, models.samples_of("bad")) == (True, 0)
    assert len(problems) == 1
    assert "/bad is left out" in problems[0]
    assert problem in problems[0]


@given(st.binary(max_size=400))
def test_no_bytes_make_the_reader_fail_otherwise_than_with_a_reason(data: bytes) -> None:
    with pytest.raises(ValueError):
        checkpoints.decode_model(data)


def test_a_model_from_the_future_counts_as_trained_now(tmp_path: Path) -> None:
    checkpoints.write(str(tmp_path), trained().save())
    models, _ = restored(tmp_path, NOW - 1000 * 24 * HOUR)
    for step in range(2000):
        models.train({"pod-0": Use(50.0, GIB)}, NOW - 1000 * 24 * HOUR + step)
    assert peaks(models)[0][0] > 50_000


class Clock:
    def __init__(self) -> None:
        self.now = 500.0

    def __call__(self) -> float:
        return self.now


def trainer(directory: Path, clock: Clock) -> Trainer:
    return Trainer(
        Models(), Schedule(), str(directory), wall=lambda: NOW + clock.now, monotonic=clock
    )


def using(cores: float) -> Measured:
    made = Measured(now=1000.0)
    made.constant(Series(Metric.POD_CPU, "a"), cores)
    made.constant(Series(Metric.POD_MEMORY, "a"), GIB)
    return made


def test_the_trainer_writes_one_file_each_ten_minutes_and_loads_it(tmp_path: Path) -> None:
    clock = Clock()
    first = trainer(tmp_path, clock)
    assert first.load() == ()
    for _ in range(10):
        first.train(using(2.0), (pod("a"),), ())
        assert os.listdir(tmp_path) == []
        clock.now += 60
    first.train(using(2.0), (pod("a"),), ())
    assert os.listdir(tmp_path) == [checkpoints.FILE]
    second = trainer(tmp_path, clock)
    assert second.load() == ()
    assert second.models.samples_of("a") == 11


def test_models_of_ended_pods_go_after_half_an_hour_but_not_right_after_a_start(
    tmp_path: Path,
) -> None:
    clock = Clock()
    first = trainer(tmp_path, clock)
    first.train(using(2.0), (pod("a"),), ())
    first.save()
    clock.now += 2 * HOUR
    second = trainer(tmp_path, clock)
    second.load()
    second.train(Measured(now=0.0), (), ())
    assert second.models.samples_of("a") == 1
    clock.now += 1801
    second.train(Measured(now=0.0), (), ())
    assert second.models.samples_of("a") == 0


def test_a_directory_that_cannot_be_written_is_a_problem_and_training_goes_on(
    tmp_path: Path,
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    clock = Clock()
    made = trainer(blocked, clock)
    clock.now += 601
    made.train(using(2.0), (pod("a"),), ())
    assert str(blocked) in made.problem
    assert made.models.samples_of("a") == 1


def test_the_names_of_the_files_stay_so_that_the_next_version_finds_them(tmp_path: Path) -> None:
    checkpoints.write(str(tmp_path), trained().save())
    assert os.listdir(tmp_path) == ["models.log"]


_HISTOGRAM = {"referenceTimestamp": "2023-11-14T12:00:00Z", "bucketWeights": {"32": 10000}}


@pytest.mark.parametrize(
    ("histogram", "problem"),
    [
        ({}, "it holds no weight"),
        ({"bucketWeights": {"3": 0}, "totalWeight": 5.0}, "it holds no weight"),
        ({"bucketWeights": {"3": 7}, "totalWeight": 0.0}, "it holds no weight"),
        ({"bucketWeights": {"3": 7}, "totalWeight": -0.5}, "it holds no weight"),
        ({"bucketWeights": {"3": 7}, "totalWeight": 1e100}, "totalWeight: 1e+100 is not a weight"),
        ({"bucketWeights": {"3": -1}, "totalWeight": 5.0}, "bucketWeights[3]: -1 is negative"),
    ],
)
@pytest.mark.parametrize("name", ["CPU", "Memory"])
def test_a_histogram_that_cannot_be_is_left_out(
    name: str, histogram: dict[str, object], problem: str
) -> None:
    broken = {"referenceTimestamp": "2023-11-14T12:00:00Z", **histogram}
    with pytest.raises(ValueError, match=f"^{name}") as refused:
        checkpoints.decode_model(json.dumps(upstream() | {name: broken}).encode())
    assert problem in str(refused.value)


@pytest.mark.parametrize("total", [1e-9, 9e99])
def test_the_weight_of_a_histogram_is_its_total(total: float) -> None:
    scaled = {**_HISTOGRAM, "bucketWeights": {"3": 1, "5": 3}, "totalWeight": total}
    found = checkpoints.decode_model(json.dumps(upstream(Memory=scaled)).encode()).memory
    assert found[[3, 5]].tolist() == pytest.approx([total / 4, total * 3 / 4])
    assert found.sum() == pytest.approx(total)

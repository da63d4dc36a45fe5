"""What is trained from measurements, and how long a model lives."""

from __future__ import annotations

import msgspec

from apis.qos import PriorityClass
from koordlet.measurement.series import Metric, Series
from koordlet.prediction.models import (
    CPU_BUCKETS,
    NODE,
    SYSTEM,
    Models,
    Saved,
    Use,
    class_key,
    samples,
)
from tests.koordlet.measured import Measured
from tests.koordlet.prediction.pods import GIB, HOUR, NOW, pod

PROD, BATCH = class_key(PriorityClass.PROD), class_key(PriorityClass.BATCH)


def measured(
    node: tuple[float, float] | None = (10.0, 20.0), **pods: tuple[float, float]
) -> Measured:
    made = Measured(now=1000.0)
    for uid, (cores, gib) in pods.items():
        made.constant(Series(Metric.POD_CPU, uid), cores)
        made.constant(Series(Metric.POD_MEMORY, uid), gib * GIB)
    if node is not None:
        made.constant(Series(Metric.NODE_CPU), node[0])
        made.constant(Series(Metric.NODE_MEMORY), node[1] * GIB)
    return made


def test_pods_classes_node_and_system_are_trained() -> None:
    pods = (pod("a"), pod("b"), pod("c", priority=PriorityClass.BATCH))
    found = samples(measured(a=(1, 2), b=(2, 3), c=(3, 4)), pods, interval_s=60)
    assert found == {
        "a": Use(1, 2 * GIB),
        "b": Use(2, 3 * GIB),
        "c": Use(3, 4 * GIB),
        PROD: Use(3, 5 * GIB),
        BATCH: Use(3, 4 * GIB),
        class_key(PriorityClass.MID): Use(),
        class_key(PriorityClass.FREE): Use(),
        class_key(PriorityClass.NONE): Use(),
        NODE: Use(10, 20 * GIB),
        SYSTEM: Use(4, 11 * GIB),
    }


def test_the_90th_percentile_since_the_last_training_is_the_sample() -> None:
    made = measured(a=(0, 1))
    made.values(Series(Metric.POD_CPU, "a"), [100.0] * 50 + [float(v) for v in range(1, 61)])
    found = samples(made, (pod("a"),), interval_s=59)
    assert found["a"].cpu_cores == 54.0


def test_an_unreadable_node_trains_neither_node_nor_system() -> None:
    found = samples(measured(node=None, a=(1, 2)), (pod("a"),), interval_s=60)
    assert NODE not in found
    assert SYSTEM not in found
    assert found[PROD] == Use(1, 2 * GIB)


def test_a_class_whose_running_pods_were_not_measured_is_not_trained() -> None:
    found = samples(measured(), (pod("a"),), interval_s=60)
    assert PROD not in found
    assert found[BATCH] == Use()
    ended = samples(measured(), (pod("a", phase="Succeeded"),), interval_s=60)
    assert ended[PROD] == Use()


def test_a_pod_without_memory_samples_is_left_out() -> None:
    made = measured(a=(1, 2), b=(1, 2))
    del made.samples[Series(Metric.POD_MEMORY, "a")]
    assert "a" not in samples(made, (pod("a"), pod("b")), interval_s=60)


def test_pods_that_used_more_than_the_node_leave_no_negative_system() -> None:
    found = samples(measured(node=(1.0, 1.0), a=(2, 3)), (pod("a"),), interval_s=60)
    assert found[SYSTEM] == Use()


def peaks(models: Models, *keys: str) -> dict[str, Use]:
    return models.peaks(keys, cpu_fraction=0.95, memory_fraction=0.98)


def test_the_row_of_a_forgotten_pod_is_empty_for_the_next_one() -> None:
    models = Models()
    models.train({"old": Use(60.0, 100 * GIB)}, NOW)
    models.train({"kept": Use(1.0, GIB)}, NOW + HOUR)
    assert models.forget_older(NOW + HOUR) == ("old",)
    models.train({"new": Use(1.0, GIB)}, NOW + HOUR)
    assert len(models) == 2
    assert peaks(models, "old", "new") == {"new": peaks(models, "kept")["kept"]}
    assert models.samples_of("old") == 0


def test_models_of_many_pods_that_come_and_go_keep_their_own_samples() -> None:
    models = Models()
    at = NOW
    for generation in range(6):
        at += HOUR
        models.train({f"{generation}-{n}": Use(n / 10, n * 2.0**20) for n in range(300)}, at)
        models.forget_older(at)
        assert len(models) == 300
        found = peaks(models, *(f"{generation}-{n}" for n in range(300)))
        for n in range(300):
            use = found[f"{generation}-{n}"]
            assert n / 10 <= use.cpu_cores <= n / 10 * 1.05 + 0.0251


def test_a_clock_that_was_set_back_does_not_silence_new_samples() -> None:
    models = Models()
    models.train({"a": Use(1.0, GIB)}, NOW)
    for _ in range(100):
        models.train({"a": Use(8.0, GIB)}, NOW - 100 * 24 * HOUR)
    assert peaks(models, "a")["a"].cpu_cores > 8.0


def test_a_pod_without_a_class_label_counts_by_its_priority() -> None:
    plain = msgspec.structs.replace(pod("a"), labels={}, priority=7500)
    found = samples(measured(a=(1, 2)), (plain,), interval_s=60)
    assert found[class_key(PriorityClass.MID)] == Use(1, 2 * GIB)
    assert found[PROD] == Use()


def saved(*, reference_s: float, updated_s: float) -> Saved:
    made = Models()
    made.train({"a": Use(1.0, GIB)}, NOW)
    (kept,) = made.save()
    return msgspec.structs.replace(
        kept, cpu_reference_s=reference_s, memory_reference_s=reference_s, updated_s=updated_s
    )


def test_a_kept_model_whose_weights_have_faded_counts_as_none() -> None:
    models = Models()
    models.train({"b": Use(1.0, GIB)}, NOW)
    models.restore(saved(reference_s=NOW - 200 * 24 * HOUR, updated_s=NOW), NOW)
    assert models.samples_of("a") == 1
    assert set(peaks(models, "a", "b")) == {"b"}


def test_samples_after_a_restart_do_not_weigh_less_than_the_kept_ones() -> None:
    models = Models()
    models.restore(saved(reference_s=NOW - HOUR, updated_s=NOW), NOW)
    for _ in range(100):
        models.train({"a": Use(8.0, GIB)}, NOW - 100 * 24 * HOUR)
    assert peaks(models, "a")["a"].cpu_cores > 8.0


def test_a_pod_without_cpu_samples_is_left_out() -> None:
    made = measured(a=(1, 2), b=(1, 2))
    del made.samples[Series(Metric.POD_CPU, "a")]
    found = samples(made, (pod("a"), pod("b")), interval_s=60)
    assert "a" not in found
    assert found[PROD] == Use(1, 2 * GIB)


def test_the_system_uses_what_the_node_does_and_no_pod_and_never_less_than_nothing() -> None:
    found = samples(measured(node=(1.0, 2.0), a=(3, 4)), (pod("a"),), interval_s=60)
    assert found[SYSTEM] == Use(0.0, 0.0)


def test_a_kept_model_keeps_its_times_and_one_from_the_future_counts_as_of_now() -> None:
    models = Models()
    models.train({"a": Use(1.0, GIB)}, NOW)
    (saved,) = models.save()
    again = Models()
    again.restore(saved, NOW + 5 * HOUR)
    (kept,) = again.save()
    assert (kept.key, kept.updated_s, kept.samples) == ("a", NOW, 1)
    early = Models()
    early.restore(saved, NOW - 5 * HOUR)
    (moved,) = early.save()
    assert moved.updated_s == NOW - 5 * HOUR
    assert early.forget_older(NOW - 5 * HOUR) == ()
    assert early.forget_older(NOW - 5 * HOUR + 1) == ("a",)


def test_a_model_of_which_the_cpu_is_forgotten_has_no_peak() -> None:
    """CPU is forgotten in half the time of memory: after 13 to 14 of its half-lives nothing of
    one sample is left, while memory's still counts."""
    models = Models()
    models.train({"a": Use(2.0, GIB)}, NOW)
    fractions = {"cpu_fraction": 0.95, "memory_fraction": 0.98}
    assert set(models.peaks(("a",), **fractions)) == {"a"}
    models.train({"b": Use(2.0, GIB)}, NOW + 101 * CPU_BUCKETS.half_life_s)
    assert set(models.peaks(("a", "b"), **fractions)) == {"b"}

"""What is trained from measurements, and how long a model lives."""

from __future__ import annotations

import msgspec
import pytest

from apis.qos import PriorityClass, QoSClass
from hooks.subject import HostAppSubject
from koordlet.measurement.series import Metric, Series
from koordlet.prediction.models import (
    CPU_BUCKETS,
    NODE,
    SYSTEM,
    Models,
    Rules,
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
        system = max(node[1] - sum(gib for _, gib in pods.values()), 0.0)
        made.constant(Series(Metric.SYSTEM_MEMORY), system * GIB)
    return made


def test_pods_classes_node_and_system_are_trained() -> None:
    pods = (pod("a"), pod("b"), pod("c", priority=PriorityClass.BATCH))
    found = samples(measured(a=(1, 2), b=(2, 3), c=(3, 4)), pods, (), interval_s=60)
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


def test_cpu_counts_with_its_90th_percentile_since_the_last_training_and_memory_with_its_peak() -> (
    None
):
    made = measured()
    values = [100.0] * 50 + [float(v) for v in range(1, 61)]
    made.values(Series(Metric.POD_CPU, "a"), values)
    made.values(Series(Metric.POD_MEMORY, "a"), values)
    made.values(Series(Metric.NODE_CPU), values)
    made.values(Series(Metric.NODE_MEMORY), values)
    found = samples(made, (pod("a"),), (), interval_s=59)
    assert found["a"] == found[PROD] == found[NODE] == Use(54.0, 60.0)
    upstream = samples(made, (pod("a"),), (), interval_s=59, rules=Rules(cut_memory_peaks=True))
    assert upstream["a"] == upstream[PROD] == upstream[NODE] == Use(54.0, 54.0)


def test_models_have_upstreams_names_which_kept_files_go_by() -> None:
    assert (NODE, SYSTEM) == ("__node__", "__node-sys__")
    assert (PROD, class_key(PriorityClass.NONE)) == ("__node-koord-prod__", "__node-__")


def test_peaks_of_pods_at_different_times_do_not_hide_the_memory_of_the_system() -> None:
    """Both pods peak with 6 of 10 bytes, one after the other; the system always has 3."""
    made = measured(node=(1.0, 10.0))
    made.values(Series(Metric.POD_CPU, "a"), [0.0, 0.0])
    made.values(Series(Metric.POD_CPU, "b"), [0.0, 0.0])
    made.values(Series(Metric.POD_MEMORY, "a"), [6.0, 1.0])
    made.values(Series(Metric.POD_MEMORY, "b"), [1.0, 6.0])
    made.values(Series(Metric.NODE_MEMORY), [10.0, 10.0])
    made.values(Series(Metric.SYSTEM_MEMORY), [3.0, 3.0])
    pods = (pod("a", priority=PriorityClass.BATCH), pod("b", priority=PriorityClass.BATCH))
    found = samples(made, pods, (), interval_s=60)
    assert found[BATCH].memory_bytes == 12.0
    assert found[SYSTEM].memory_bytes == 3.0


@pytest.mark.parametrize(
    ("priority", "counted_in"),
    [
        ("koord-prod", SYSTEM),
        ("koord-mid", SYSTEM),
        ("koord-batch", BATCH),
        ("koord-free", class_key(PriorityClass.FREE)),
        ("", SYSTEM),
    ],
)
def test_a_host_application_counts_in_a_class_that_yields_to_mid_pods_and_else_in_the_system(
    priority: str, counted_in: str
) -> None:
    made = with_host_app()
    app = HostAppSubject("yarn", QoSClass.BE, "hadoop-yarn", priority)
    found = samples(made, (pod("a"),), (app,), interval_s=60)
    expected = {SYSTEM: Use(5, 9 * GIB), PROD: Use(1, 2 * GIB)}
    if counted_in != SYSTEM:
        expected |= {SYSTEM: Use(2, 5 * GIB), counted_in: Use(3, 4 * GIB)}
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize("cut_memory_peaks", [True, False])
@pytest.mark.parametrize("priority", ["koord-prod", "koord-batch", "koord-free", ""])
def test_compat_host_applications_of_every_class_count_as_system(
    priority: str, cut_memory_peaks: bool
) -> None:
    app = HostAppSubject("yarn", QoSClass.BE, "hadoop-yarn", priority)
    rules = Rules(host_apps_are_system=True, cut_memory_peaks=cut_memory_peaks)
    found = samples(with_host_app(), (pod("a"),), (app,), interval_s=60, rules=rules)
    assert found[SYSTEM] == Use(5, 9 * GIB)
    assert found[BATCH] == found[class_key(PriorityClass.FREE)] == Use()


def with_host_app() -> Measured:
    """Return 6 cores and 11 GiB of a node: 1 and 2 of a pod, 3 and 4 of a host application."""
    made = measured(node=(6.0, 11.0), a=(1, 2))
    made.constant(Series(Metric.HOST_APP_CPU, "yarn"), 3.0)
    made.constant(Series(Metric.HOST_APP_MEMORY, "yarn"), 4.0 * GIB)
    made.constant(Series(Metric.SYSTEM_MEMORY), 5.0 * GIB)
    return made


def test_what_the_former_version_learned_fades_and_no_peak_jumps_at_an_upgrade() -> None:
    """It counted the application as system: its samples keep the peak until they are outweighed."""
    app = HostAppSubject("yarn", QoSClass.BE, "hadoop-yarn", "koord-batch")
    made, pods = with_host_app(), (pod("a"),)
    former_rules = Rules(host_apps_are_system=True, cut_memory_peaks=True)
    former, upgraded = Models(), Models()
    learned = samples(made, pods, (app,), interval_s=60, rules=former_rules)
    for minute in range(-2 * 24 * 60, 0):
        former.train(learned, NOW + 60 * minute)
    for kept in former.save():
        upgraded.restore(kept, NOW)
    keys = ("a", PROD, NODE, SYSTEM)
    before = peaks(former, *keys)
    found = samples(made, pods, (app,), interval_s=60)
    for minute in range(24 * 60):
        upgraded.train(found, NOW + 60 * minute)
    assert peaks(upgraded, *keys) == before
    for minute in range(24 * 60, 3 * 24 * 60):
        upgraded.train(found, NOW + 60 * minute)
    assert 2.0 <= peaks(upgraded, SYSTEM)[SYSTEM].cpu_cores < 2.2
    for minute in range(3 * 24 * 60, 6 * 24 * 60):
        upgraded.train(found, NOW + 60 * minute)
    after = peaks(upgraded, *keys)
    assert (after["a"], after[PROD], after[NODE]) == (before["a"], before[PROD], before[NODE])
    assert 5 * GIB <= after[SYSTEM].memory_bytes < 5.4 * GIB


def test_a_host_application_that_does_not_run_changes_nothing() -> None:
    app = HostAppSubject("yarn", QoSClass.BE, "hadoop-yarn", "koord-batch")
    made = measured(a=(1, 2))
    assert samples(made, (pod("a"),), (app,), interval_s=60) == samples(
        made, (pod("a"),), (), interval_s=60
    )


def test_an_unreadable_node_trains_neither_node_nor_system() -> None:
    found = samples(measured(node=None, a=(1, 2)), (pod("a"),), (), interval_s=60)
    assert NODE not in found
    assert SYSTEM not in found
    assert found[PROD] == Use(1, 2 * GIB)


def test_a_class_whose_running_pods_were_not_measured_is_not_trained() -> None:
    found = samples(measured(), (pod("a"),), (), interval_s=60)
    assert PROD not in found
    assert found[BATCH] == Use()
    ended = samples(measured(), (pod("a", phase="Succeeded"),), (), interval_s=60)
    assert ended[PROD] == Use()


def test_a_pod_without_memory_samples_is_left_out() -> None:
    made = measured(a=(1, 2), b=(1, 2))
    del made.samples[Series(Metric.POD_MEMORY, "a")]
    assert "a" not in samples(made, (pod("a"), pod("b")), (), interval_s=60)


def test_pods_that_used_more_than_the_node_leave_no_negative_system() -> None:
    found = samples(measured(node=(1.0, 1.0), a=(2, 3)), (pod("a"),), (), interval_s=60)
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
    found = samples(measured(a=(1, 2)), (plain,), (), interval_s=60)
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
    found = samples(made, (pod("a"), pod("b")), (), interval_s=60)
    assert "a" not in found
    assert found[PROD] == Use(1, 2 * GIB)


def test_the_system_uses_what_the_node_does_and_no_pod_and_never_less_than_nothing() -> None:
    found = samples(measured(node=(1.0, 2.0), a=(3, 4)), (pod("a"),), (), interval_s=60)
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

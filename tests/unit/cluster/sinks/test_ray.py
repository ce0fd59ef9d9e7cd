"""What is set and counted when, with Ray's gauges and counters replaced by lists. tests/integration/test_monitoring.py asks Prometheus."""

import re
import threading
from collections import Counter

import pytest

from cluster.record.run_directory import RunDirectory
from cluster.sinks import ray
from cluster.sinks.ray import RayMetrics
from cluster.sinks.tracked import identity


class Ray:
    """What has been set since the last look, and all counts."""

    def __init__(self) -> None:
        self.is_connected = True
        self.gauges: dict[str, float] = {}
        self.counts: Counter[str] = Counter()

    def drained(self) -> dict[str, float]:
        gauges, self.gauges = self.gauges, {}
        return gauges

    def gauge(self, name: str, **_):
        return _Metric(set=lambda value, tags: self.gauges.update({f"{name} of {tags['run']}": value}))

    def counter(self, name: str, **_):
        return _Metric(inc=lambda tags: self.counts.update([f"{name} {tags['kind']} of {tags['run']}"]))


class _Metric:
    def __init__(self, **methods) -> None:
        self.__dict__.update(methods)


@pytest.fixture
def there(monkeypatch) -> Ray:
    fake = Ray()
    monkeypatch.setattr(ray, "Gauge", fake.gauge)
    monkeypatch.setattr(ray, "Counter", fake.counter)
    monkeypatch.setattr(ray, "is_initialized", lambda: fake.is_connected)
    return fake


def test_a_number_is_set_again_until_a_step_has_another_one(there):
    times = iter((100.0, 130.0, 170.0))
    metrics = RayMetrics("r", now=lambda: next(times))
    metrics.step(1, {"eval/reward": 0.5, "loss": 1.0})
    metrics.step(2, {"loss": 2.0})
    there.drained()
    metrics.repeat()
    assert there.drained() == {
        "treadwheel_eval_reward of r": 0.5,
        "treadwheel_loss of r": 2.0,
        "treadwheel_policy_version of r": 2.0,
        "treadwheel_last_step_time of r": 170.0,
    }


def test_sources_with_names_in_any_script_have_a_gauge_each(there):
    metrics = RayMetrics("r", now=lambda: 100.0)
    metrics.step(1, {"reward/mean/数学": 0.25, "reward/mean/语文": 0.75})
    found = there.drained()
    assert sorted(value for name, value in found.items() if "reward" in name) == [0.25, 0.75]
    assert all(re.fullmatch(r"[a-zA-Z0-9_]+ of r", name) for name in found)


def test_runs_in_directories_of_one_name_have_different_names(there, tmp_path):
    directories = [RunDirectory(str(tmp_path / team / "mine")) for team in ("a", "b")]
    for directory in directories:
        metrics = ray.ray(directory=directory, num_steps=1)
        metrics.repeat()
        metrics.close()
    names = {f"treadwheel_last_step_time of mine-{identity(directory)[:4]}" for directory in directories}
    assert there.drained().keys() == names


def test_numbers_that_are_added_to_a_step_are_no_progress(there):
    times = iter((100.0, 130.0))
    metrics = RayMetrics("r", now=lambda: next(times))
    metrics.step(1, {"loss": 1.0})
    metrics.step(1, {"eval/reward": 0.5})
    assert there.drained()["treadwheel_last_step_time of r"] == 130.0


def test_what_comes_before_ray_is_connected_waits_for_it(there):
    there.is_connected = False
    metrics = RayMetrics("r", now=lambda: 100.0)
    metrics.event({"kind": "launched"})
    metrics.repeat()
    assert not there.counts
    there.is_connected = True
    metrics.repeat()
    metrics.repeat()
    assert there.counts == {"treadwheel_events launched of r": 1}
    assert there.drained() == {"treadwheel_last_step_time of r": 100.0}


def test_an_actor_that_leaves_its_node_is_no_failure(there):
    metrics = RayMetrics("r")
    for decision in ("drain", "restart", "drain"):
        metrics.event({"kind": "failure", "decision": decision})
    assert there.counts == {"treadwheel_events drain of r": 2, "treadwheel_events failure of r": 1}


def test_a_thread_sets_the_numbers_again_until_the_end(there, monkeypatch, tmp_path):
    is_set = threading.Event()
    monkeypatch.setattr(ray, "REPEAT_S", 0.001)
    monkeypatch.setattr(ray, "Gauge", lambda name, **_: _Metric(set=lambda value, tags: is_set.set()))
    metrics = ray.ray(directory=RunDirectory(str(tmp_path)), num_steps=1)
    assert is_set.wait(60)
    metrics.close()


@pytest.mark.parametrize("how", ["finished", "stopped", "failed"])
def test_the_end_is_counted_and_nothing_is_repeated_after_it(there, how):
    metrics = RayMetrics("r")
    metrics.event({"kind": how})
    metrics.repeat_until_the_end()  # would not return
    assert there.counts == {f"treadwheel_events {how} of r": 1}

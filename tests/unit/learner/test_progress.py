"""What a rank says of its work while it works, and how long the parts of a step took."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from learner import progress
from learner.learner import Learner
from learner.progress import Laps
from tests.unit.learner.test_sft import SFT, Asked
from tests.unit.learner.trajectories import make_config, make_group


@pytest.mark.slow
def test_every_pass_and_every_bucket_is_progress(model_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each pass of a first look, of updates and of demonstrations takes ten seconds here, and so does the sending of a bucket."""
    config = make_config(
        model_path,
        algorithm={"proximal": "recompute", "sft": SFT},
        learner={"max_tokens_per_micro_batch": 8, "mini_batches": 2},
        weights={"bucket_bytes": 2**16},
    )
    learner, clock, idle = Learner(config, demonstrations=Asked()), SimpleNamespace(now=0.0), list[float]()
    monkeypatch.setattr(progress, "time", SimpleNamespace(time=lambda: clock.now, perf_counter=time.perf_counter))

    def work(*_: Any) -> None:
        idle.append(clock.now - learner.progress().last_progress)
        clock.now += 10.0

    of_passes = learner.networks.register_forward_pre_hook(work)
    learner.update(*(make_group(index) for index in range(2)))
    of_passes.remove()
    num_passes = len(idle)
    for _ in learner.publish():
        work()
    assert num_passes >= 10 and len(idle) > num_passes + 5
    assert set(idle) == {0.0}


def test_a_part_of_a_step_that_comes_twice_takes_the_time_of_both(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=iter([100.0, 101.0, 103.0, 106.0]).__next__))
    laps = Laps()
    for name in ("gradient", "optimizer", "gradient"):
        laps.lap(name)
    assert laps.seconds == {"gradient": 4.0, "optimizer": 2.0} and laps.total == 6.0

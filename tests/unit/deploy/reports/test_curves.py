import math

import pytest

from cluster.record.run_directory import METRICS, RunDirectory
from deploy.reports.curves import NAME, curves, draw


def test_a_run_without_numbers_has_no_curves(tmp_path):
    assert not draw(RunDirectory(str(tmp_path)))


def test_curves_are_an_image(tmp_path):
    directory = RunDirectory(str(tmp_path))
    for version in range(3):
        directory.append_json(METRICS, {"policy_version": version, "time": 0.0, "reward/mean": 0.1 * version})
    assert draw(directory)
    assert directory.read_file(NAME).to_pybytes().startswith(b"\x89PNG")


def test_no_line_is_drawn_between_evaluations_that_are_steps_apart():
    steps = {0: {"eval/accuracy": 0.1, "other": 1.0}, 2: {"eval/accuracy": 0.8}, 3: {"eval/accuracy": 0.9}}
    lines = curves(steps, (("eval/accuracy", "held-out accuracy"), ("reward/mean", "sampled")))
    assert lines == {"held-out accuracy": pytest.approx([0.1, math.nan, 0.8, 0.9], nan_ok=True)}

from cluster.record.run_directory import METRICS, RunDirectory
from deploy.reports.curves import NAME, _unbroken, draw


def test_a_run_without_numbers_has_no_curves(tmp_path):
    assert not draw(RunDirectory(str(tmp_path)))


def test_curves_are_an_image(tmp_path):
    directory = RunDirectory(str(tmp_path))
    for version in range(3):
        directory.append_json(METRICS, {"policy_version": version, "time": 0.0, "reward/mean": 0.1 * version})
    assert draw(directory)
    assert directory.read_file(NAME).to_pybytes().startswith(b"\x89PNG")


def test_no_line_is_drawn_between_evaluations_that_are_steps_apart():
    assert _unbroken([0, 80]) == [slice(0, 1), slice(1, 2)]
    assert _unbroken([1, 2, 3, 7, 8]) == [slice(0, 3), slice(3, 5)]

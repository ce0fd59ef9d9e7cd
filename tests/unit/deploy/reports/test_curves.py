from cluster.record.run_directory import METRICS, RunDirectory
from deploy.reports.curves import NAME, draw


def test_a_run_without_numbers_has_no_curves(tmp_path):
    assert not draw(RunDirectory(str(tmp_path)))


def test_curves_are_an_image(tmp_path):
    directory = RunDirectory(str(tmp_path))
    for version in range(3):
        directory.append_json(METRICS, {"policy_version": version, "time": 0.0, "reward/mean": 0.1 * version})
    assert draw(directory)
    assert directory.read_file(NAME).to_pybytes().startswith(b"\x89PNG")

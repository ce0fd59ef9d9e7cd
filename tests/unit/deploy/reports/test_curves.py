from cluster.record.run_directory import CURVES, RunDirectory
from deploy.reports.curves import draw
from tests.unit.deploy.viewer.run_files import event, step, write_run


def test_a_run_without_numbers_has_no_curves(tmp_path):
    assert not draw(RunDirectory(str(tmp_path)), [])


def test_curves_are_an_image(tmp_path):
    failed = event("failure", 1.0, actor="a", failure="death", reason="signal 9", decision="restart")
    numbers = {"reward__mean": 0.5, "mismatch__mean_abs_nats": 1e-3, "staleness__max": 1.0}
    # Between two dollar signs matplotlib reads formulas, of which these are none.
    steps = [
        step(0, eval__reward=0.25),
        *(step(version, **numbers, **{"reward__$x_$": 1.0}) for version in range(1, 4)),
    ]
    directory = RunDirectory(str(write_run(tmp_path / "$run_$", steps=steps, events=[failed])))
    assert draw(directory, steps)
    assert directory.read_file(CURVES).to_pybytes().startswith(b"\x89PNG")


def test_one_step_is_enough_to_draw(tmp_path):
    steps = [step(1, reward__mean=0.5)]
    assert draw(RunDirectory(str(write_run(tmp_path / "run", steps=steps))), steps)

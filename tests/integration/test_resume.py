"""What is killed and resumed equals what was left alone, bit for bit; tampering shows."""

import shutil
import signal

import pytest

from cluster.record.run_directory import RunDirectory
from tests.integration.commands import treadwheel
from tests.integration.faults import Run, assert_equal_bit_for_bit, undisturbed_run, until

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.acceptance, pytest.mark.timeout(1800)]
STEPS = range(1, 13)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Run:
    return undisturbed_run(tmp_path_factory)[1]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> Run:
    """Its driver was killed while it updated and while it saved; its ledger was torn. test_outage.py kills one that samples."""
    run_file, _ = undisturbed_run(tmp_path_factory)
    run = Run(tmp_path_factory.mktemp("resumed") / "run")
    moments = {
        "updating": lambda: run.num_recorded() > max(run.num_steps(), 2),
        "saving": lambda: any((run.path / "checkpoints").glob(".*")) and run.num_steps() > max(4, num_recorded),
    }
    for name, moment in moments.items():
        # It may be more than 4: this driver is to record one, which removes the torn line.
        num_recorded = run.num_recorded()
        with run.start(run_file, "checkpoint.every_steps=1") as driver:
            if name == "updating":
                until(lambda: run.events("launched"), process=driver)
                driver.send(signal.SIGSTOP)  # a quick run would be over before a command of a busy machine is refused
                refused = treadwheel("train", run_file, f"run_dir={run.path}")
                driver.send(signal.SIGCONT)
                assert refused.returncode == 2 and "is in use by process" in refused.stderr, refused.stderr
            until(moment, process=driver)
            run.kill_driver()
        if name == "updating":
            ledger = run.path / "ledger" / "ledger.jsonl"
            with ledger.open("a") as file:
                file.write('{"step": 99, "groups": [1, 2')
    return run.to_end(run_file)


def test_a_run_whose_driver_was_killed_twice_equals_the_undisturbed_one(undisturbed, resumed):
    assert len(resumed.events("launched")) == 3
    found = [event["recorded_steps"] for event in resumed.events("resumed")]
    assert len(found) == 2 and 2 <= found[0] <= found[1] <= 12
    assert_equal_bit_for_bit(undisturbed, resumed, steps=STEPS, checkpoint=12)
    assert resumed.groups() == undisturbed.groups()
    assert resumed.problems() == ()


def test_the_torn_line_of_a_ledger_is_removed_and_said_so(resumed):
    assert [event["num_lines"] for event in resumed.events("ledger_torn")] == [1]


def test_verify_names_what_was_altered(undisturbed, tmp_path):
    assert undisturbed.problems() == ()
    altered = _copy(undisturbed, tmp_path / "altered")
    file = altered.path / "trajectories" / "step-000005.arrow"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert [problem[:40] for problem in altered.problems()] == ["step 5: trajectories/step-000005.arrow w"]


def test_verify_names_a_missing_and_a_torn_line(undisturbed, tmp_path):
    missing = _copy(undisturbed, tmp_path / "missing")
    ledger = missing.path / "ledger" / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(lines[:4] + lines[5:]))
    assert missing.problems() == ("ledger/ledger.jsonl line 5: step 6 does not follow step 4",)
    ledger.write_text("".join(lines)[:-20])
    assert "its last line is torn" in missing.problems()[0]


def _copy(run: Run, folder) -> Run:
    shutil.copytree(run.path, folder)
    assert RunDirectory(str(folder)).owner() is None
    return Run(folder)

"""A driver that is killed and starts again is one run to every tracker: read back from what each keeps offline."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.contracts.schema import to_batch
from cluster.record.recorder import Recorder
from cluster.record.run_directory import RunDirectory
from tests import tracker_files
from tests.integration.terminals import Terminal
from tests.unit.cluster.contracts.rows import row

pytestmark = pytest.mark.slow

_DRIVER = """
import sys, signal
from cluster.contracts.config import MetricsConfig
from cluster.metrics import open_log
from cluster.record.run_directory import RunDirectory

folder, tracker, first, last, reward, ending = sys.argv[1:]
config = MetricsConfig(sinks=[{"name": tracker, "project": "together"}])
with open_log(config, directory=RunDirectory(folder), num_steps=5) as log:
    log.event("launched")
    # As many numbers as a run has: SwanLab writes its file by eight kilobytes, which take half a minute without them.
    others = {f"learner/number_{number}": 0.5 for number in range(150 if tracker == "swanlab" else 0)}
    for version in range(int(first), int(last) + 1):
        log.step(version, {"reward/mean": float(reward), **others})
    if ending == "killed":
        signal.pause()
    log.event("preempted", message="its node goes away")
    for sink in log._sinks:
        sink.mark().wait()  # its start may take longer than an end waits for
    log.end("stopped")
"""
_ALONE = """
import sys
from cluster.contracts.config import MetricsConfig
from cluster.metrics import open_log
from cluster.record.run_directory import RunDirectory

folder, tracker = sys.argv[1:]
with open_log(MetricsConfig(sinks=[{"name": tracker}]), directory=RunDirectory(folder), num_steps=1) as log:
    log.step(1, {"reward/mean": 0.5})
    log._sinks[0].mark().wait(300)
    log._patience_s = 1.0
    log.end("finished")
"""
_KEY = "0123456789abcdef0123456789abcdef01234567"
_SECRETS = ("WANDB_API_KEY", "SWANLAB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "HF_TOKEN")
_RUN_YAML = "seed: 7\nmodel:\n  path: tiny/model\n  note: '***'\n"


def _mlflow(folder: Path) -> tuple[set[str], dict[int, float], str]:
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as database:
        runs = {run for (run,) in database.execute("select run_uuid from runs")}
        rows = "select step, value from metrics where key = 'reward/mean' order by timestamp"
        parameters = database.execute("select key, value from params").fetchall()
        status = database.execute("select status from runs").fetchall()
        return runs, dict(database.execute(rows).fetchall()), f"{parameters} {status}"


def _trackio(folder: Path) -> tuple[set[str], dict[int, float], str]:
    (store,) = (folder / "trackio").glob("*.db")
    with contextlib.closing(sqlite3.connect(store)) as database:
        rows = database.execute(
            "select run_name, step, json_extract(metrics, '$.\"reward/mean\"') from metrics order by timestamp"
        ).fetchall()
        configs = database.execute("select config from configs").fetchall()
        alerts = database.execute("select title from alerts").fetchall()
    return {name for name, _, _ in rows}, {step: value for _, step, value in rows}, f"{configs} {alerts}"


def _wandb(folder: Path) -> tuple[set[str], dict[int, float], str]:
    records = list(tracker_files.wandb_records(folder))
    runs = {record.run.run_id for record in records if record.WhichOneof("record_type") == "run"}
    rows = {row["policy_version"]: row["reward/mean"] for row in tracker_files.wandb_rows(folder)}
    return runs, rows, " ".join(str(record) for record in records)


def _swanlab(folder: Path) -> tuple[set[str], dict[int, float], str]:
    records = list(tracker_files.swanlab_records(folder))
    runs = {record.start.id for record in records if record.HasField("start")}
    settings = " ".join(file.read_text() for file in folder.glob("swanlab/run-*/files/config.yaml"))
    return runs, tracker_files.swanlab_numbers(folder, "reward/mean"), f"{settings} {records[-1]}"


_READERS: dict[str, Callable[[Path], tuple[set[str], dict[int, float], str]]] = {
    "mlflow": _mlflow,
    "swanlab": _swanlab,
    "trackio": _trackio,
    "wandb": _wandb,
}


def _driver(folder: Path, tracker: str, *what: str) -> subprocess.Popen[bytes]:
    hidden = ("WANDB_", "SWANLAB_", "MLFLOW_", "TRACKIO_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    environment |= {"TRACKIO_DIR": str(folder / "trackio"), "WANDB_MODE": "offline", "SWANLAB_MODE": "offline"}
    environment["WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL"] = "0.2"  # seconds, else 15
    environment |= dict.fromkeys(_SECRETS, _KEY)
    with (folder / "output.txt").open("ab") as output:
        command = [sys.executable, "-c", _DRIVER, str(folder), tracker, *what]
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


@pytest.mark.parametrize("tracker", sorted(_READERS))
def test_a_run_that_is_killed_and_then_preempted_is_one_run_with_all_its_steps_and_no_secret(tracker, tmp_path):
    read = _READERS[tracker]
    (tmp_path / "run.yaml").write_text(_RUN_YAML)
    Recorder(RunDirectory(str(tmp_path))).record(1, to_batch([row(completion_text="forty-two")]))
    killed = _driver(tmp_path, tracker, "1", "3", "0.25", "killed")
    try:
        while True:  # the test's own timeout ends it
            with contextlib.suppress(Exception):  # files that a living process is writing
                if len(read(tmp_path)[1]) == 3:
                    break
            assert killed.poll() is None
            time.sleep(0.1)
    finally:
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()

    assert _driver(tmp_path, tracker, "3", "5", "0.75", "preempted").wait() == 0

    runs, rewards, told = read(tmp_path)
    assert len(runs) == 1
    assert rewards == {1: 0.25, 2: 0.25, 3: 0.75, 4: 0.75, 5: 0.75}
    kept = [file for file in tmp_path.rglob("*") if file.is_file() and file.suffix != ".arrow"]
    assert any(b"forty-two" in file.read_bytes() for file in kept), "a trajectory of step 1"
    assert "model.path" in told and "tiny/model" in told
    assert {"mlflow": "SCHEDULED", "swanlab": "preempted: its node", "trackio": "run preempted", "wandb": "preempting"}[
        tracker
    ] in told
    leaks = [file for file in tmp_path.rglob("*") if file.is_file() and _KEY.encode() in file.read_bytes()]
    assert leaks == [], "the key of the environment"


@pytest.mark.parametrize("tracker", ["swanlab", "wandb"])
def test_a_tracker_without_a_login_asks_no_terminal_for_one_and_is_left_out(tracker, tmp_path):
    (tmp_path / "run.yaml").write_text(_RUN_YAML)
    online = {"HOME": str(tmp_path), "WANDB_MODE": "online", "SWANLAB_MODE": "online"}
    with Terminal(sys.executable, "-c", _ALONE, str(tmp_path), tracker, env=online, columns=200) as terminal:
        assert terminal.exit_code() == 0
        assert "choice" not in terminal.everything
        assert f"metrics sink {tracker} is left out" in terminal.everything.lower()
        assert {"swanlab": "no TTY", "wandb": "No API key"}[tracker] in terminal.everything

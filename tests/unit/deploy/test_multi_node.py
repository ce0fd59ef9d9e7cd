"""Several machines without Kubernetes: each file is read by its own tool, as far as that is installed."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from cluster.contracts.errors import ConfigError
from deploy.config.loading import load
from deploy.preflight import check_assumed, hardware
from tests.model_shapes import write
from tests.programs import needs

SBATCH = "deploy/slurm/train.sbatch"
SKYPILOT = "deploy/skypilot/train.yaml"
SKYPILOT_GPUS = {"L4": "24GB", "L40S": "48GB"}
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
REQUEUE = "scontrol requeue incomplete 7"
"""Of a job that still runs: without the word SLURM would queue a job again that scancel ends."""
CHECK = "--only-settings"


def cluster():
    return yaml.safe_load(Path("ray_cluster.yaml").read_text(encoding="utf-8"))


def test_ray_takes_the_cluster_file():
    validate_config(prepare_config(cluster()))


@pytest.mark.parametrize("broken", [{"provder": {}}, {"max_workers": "two"}])
def test_ray_refuses_a_field_that_it_does_not_know_and_a_wrong_type(broken):
    with pytest.raises(Exception, match=r"provder|two"):
        validate_config(cluster() | broken)


def test_every_ray_of_the_cluster_asks_for_the_token_and_workers_drain():
    head, worker = cluster()["head_start_ray_commands"][-1], cluster()["worker_start_ray_commands"][-1]
    assert "RAY_AUTH_MODE=token" in head and "RAY_AUTH_MODE=token" in worker
    assert "--dashboard-host=127.0.0.1" in head
    assert "RAY_enable_autoscaler_v2=0" in head, "the newer one starts no worker of a `local` provider"
    assert "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=60 nohup ray start" in worker and "--block" in worker
    assert worker.endswith("&"), "ray up waits for the command"


def scripts():
    task = yaml.safe_load(Path(SKYPILOT).read_text(encoding="utf-8"))
    commands = [*cluster()["head_start_ray_commands"], *cluster()["worker_start_ray_commands"]]
    return [Path(SBATCH).read_text(encoding="utf-8"), task["setup"], task["run"], *commands]


@pytest.mark.parametrize("script", scripts())
def test_bash_reads_every_script(script):
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs("shellcheck", package="shellcheck")
def test_shellcheck_finds_nothing():
    done = subprocess.run(["shellcheck", SBATCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_batch_script_says_how_it_is_called():
    done = subprocess.run(["bash", SBATCH], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("usage: sbatch deploy/slurm/train.sbatch RUN.yaml")


def test_the_skypilot_task_names_a_run_file_that_is_there_and_holds_no_token():
    task = yaml.safe_load(Path(SKYPILOT).read_text(encoding="utf-8"))
    load(task["envs"]["RUN"])
    assert task["secrets"] == {"RAY_AUTH_TOKEN": None}
    assert "RAY_AUTH_MODE=token" in task["run"]


@pytest.mark.parametrize("has_python", [True, False])
def test_the_setup_of_the_skypilot_task_installs_with_a_python_that_fits(has_python, tmp_path):
    """Its images have Python 3.10, and its own uv."""
    for name, body in (
        ("deploy/install.sh", 'echo "$1 ${PYTHON:-its own}"'),
        (".local/bin/uv", '[ "$2" = find ] && echo /uv/python3.12; true'),
        ("bin/python3.12" if has_python else "bin/python3.10", "true"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "bin/bash").symlink_to("/bin/bash")
    (tmp_path / "bin/env").symlink_to("/usr/bin/env")
    setup = yaml.safe_load(Path(SKYPILOT).read_text(encoding="utf-8"))["setup"]
    env = {"HOME": str(tmp_path), "PATH": str(tmp_path / "bin")}
    done = subprocess.run(["/bin/bash", "-ec", setup], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout == ("gpu its own\n" if has_python else "gpu /uv/python3.12\n"), done.stderr


def test_the_skypilot_tasks_run_fits_on_its_nodes_and_on_no_fewer(tmp_path):
    """A run on a cluster checks that only once its nodes are there."""
    task = yaml.safe_load(Path(SKYPILOT).read_text(encoding="utf-8"))
    kind, _, number = task["resources"]["accelerators"].partition(":")
    each = f"gpus={number}x{SKYPILOT_GPUS[kind]},cpus={task['resources']['cpus'].removesuffix('+')}"
    write(MODEL, tmp_path / "model")
    config = load(task["envs"]["RUN"], [f"model.path={tmp_path / 'model'}"])
    assert load(task["envs"]["RUN"], []).model.path == MODEL
    check_assumed(config, hardware.parse([each, f"nodes={task['num_nodes']}"]))
    with pytest.raises(ConfigError, match="3 GPUs asked for, the cluster has 2"):
        check_assumed(config, hardware.parse([each, f"nodes={task['num_nodes'] - 1}"]))


def stand_ins(folder, **scripts):
    tools = folder / ".venv" / "bin"
    tools.mkdir(parents=True)
    for name, script in scripts.items():
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    return tools


WAITS = pytest.mark.parametrize(
    ("run", "is_its_own"),
    [
        ("elastic:\n  wait_for_nodes_s: 7200\n", True),
        ("elastic: {max_workers: 4, wait_for_nodes_s: 7200}\n", True),
        ("elastic:\n  max_workers: 4\n  # wait_for_nodes_s: 7200\n", False),
    ],
)


def calls_of_the_batch_script(folder, *more, health_check="exit 0", settings=0, code=0, preempted="None"):
    """What it has srun, scontrol and treadwheel do, on two nodes; its exit code. A `ray start` ends with the job, a session of its own."""
    say = 'echo "$0 $*" | sed "s|.*/||" >>calls'
    job = f'echo "   PreemptTime={preempted}"; yes | head -c 100000'
    stand_ins(
        folder,
        python="echo secret",
        ray=f'[ "$1" = start ] && exec sleep 600; {health_check}',
        scontrol=f'case "$2" in hostnames) printf "a\\nb\\n" ;; job) {job} ;; *) {say} ;; esac',
        srun='echo "srun: $SRUN_CPUS_PER_TASK CPUs: $*" >>calls; while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"',
        treadwheel=f'{say}; case "$*" in *{CHECK}) exit {settings} ;; esac; '
        f"while [ $(grep -c srun: calls) -lt 2 ]; do sleep 0.01; done; exit {code}",
    )
    slurm = {"SUBMIT_DIR": str(folder), "JOB_NODELIST": "[a-b]", "JOB_ID": "7", "CPUS_PER_TASK": "16"}
    environment = {"PATH": os.environ["PATH"], **{f"SLURM_{name}": value for name, value in slurm.items()}}
    job = subprocess.Popen(
        ["bash", os.path.abspath(SBATCH), "run.yaml", *more], env=environment, start_new_session=True
    )
    try:
        ended = job.wait(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    return (folder / "calls").read_text(encoding="utf-8").splitlines(), ended


def test_every_step_of_the_batch_script_has_all_cpus_of_its_node(tmp_path):
    """Since Slurm 22.05 srun does not take sbatch's --cpus-per-task by itself."""
    calls, ended = calls_of_the_batch_script(tmp_path)
    assert ended == 0
    assert sum(call.startswith("srun: 16 CPUs: --nodes=1 --ntasks=1 --overlap ") for call in calls) == 2
    check, train = (call for call in calls if call.startswith("treadwheel train "))
    assert check == f"{train} {CHECK}" and calls[0] == check
    assert train.endswith(" --wait-for-claim 10m --wait-for-nodes 10m run.yaml"), (
        "one's own options count: the last does"
    )


def test_a_wrong_setting_ends_the_batch_script_before_ray_starts(tmp_path):
    """Seen before: half a minute later, once head and workers were up on all nodes."""
    calls, ended = calls_of_the_batch_script(tmp_path, settings=2)
    assert ended == 2 and len(calls) == 1 and calls[0].endswith(CHECK)


@WAITS
def test_a_run_of_the_batch_script_keeps_its_own_wait_for_nodes(run, is_its_own, tmp_path):
    (tmp_path / "run.yaml").write_text(run)
    calls, _ = calls_of_the_batch_script(tmp_path)
    assert any("--wait-for-nodes" in call for call in calls) is not is_its_own


def test_an_override_of_the_wait_for_nodes_counts_in_the_batch_script(tmp_path):
    calls, _ = calls_of_the_batch_script(tmp_path, "run_dir=/shared", "elastic.wait_for_nodes_s=7200")
    assert not any("--wait-for-nodes" in call for call in calls)


def test_a_run_that_a_node_ended_goes_back_into_the_queue(tmp_path):
    calls, ended = calls_of_the_batch_script(tmp_path, code=75)
    assert ended == 75 and REQUEUE in calls


@pytest.mark.parametrize(("preempted", "is_requeued"), [("2026-11-29T06:19:11", True), ("None", False)])
def test_a_run_that_failed_goes_back_into_the_queue_only_if_its_job_was_preempted(preempted, is_requeued, tmp_path):
    calls, ended = calls_of_the_batch_script(tmp_path, code=1, preempted=preempted)
    assert ended == 1 and (REQUEUE in calls) is is_requeued


def test_a_job_that_is_stopped_before_its_nodes_are_there_goes_back_into_the_queue(tmp_path):
    calls, ended = calls_of_the_batch_script(tmp_path, health_check="kill -TERM $PPID; exit 1")
    assert ended == 143 and REQUEUE in calls
    assert [call for call in calls if call.startswith("treadwheel") and not call.endswith(CHECK)] == []


@pytest.mark.parametrize("code", [0, 1, 75])
def test_the_skypilot_task_ends_as_its_run_does(code, tmp_path):
    """A managed job is tried again if it failed: Ray's stop after the run succeeds always."""
    tools = stand_ins(tmp_path, activate="", treadwheel=f"exit {code}", ray="exit 0")
    nodes = {
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NODE_RANK": "0",
        "RUN": "run.yaml",
        "RUN_DIR": "/shared",
    }
    script = yaml.safe_load(Path(SKYPILOT).read_text(encoding="utf-8"))["run"]
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", **nodes}
    assert subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment).returncode == code


@WAITS
def test_a_run_of_the_skypilot_task_keeps_its_own_wait_for_nodes(run, is_its_own, tmp_path):
    (tmp_path / "run.yaml").write_text(run)
    tools = stand_ins(tmp_path, activate="", treadwheel='echo "$*" >call', ray="exit 0")
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.1", "SKYPILOT_NODE_RANK": "0", "RUN": "run.yaml", "RUN_DIR": "/shared"}
    script = yaml.safe_load(Path(SKYPILOT).read_text(encoding="utf-8"))["run"]
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", **nodes}
    subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, check=True)
    call = (tmp_path / "call").read_text()
    assert "--wait-for-claim 10m" in call and ("--wait-for-nodes 10m" in call) is not is_its_own


def test_the_skypilot_task_fails_where_its_ray_does_not_start(tmp_path):
    """Nothing else would end its nodes, which cost money."""
    tools = stand_ins(tmp_path, activate="", treadwheel="exit 0", ray="exit 1")
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.1", "SKYPILOT_NODE_RANK": "0", "RUN": "run.yaml", "RUN_DIR": "/shared"}
    script = yaml.safe_load(Path(SKYPILOT).read_text(encoding="utf-8"))["run"]
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", **nodes}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and "Ray's head ended" in done.stderr


def test_run_files_are_copied_to_the_machines_and_runs_are_not():
    """rsync leaves out a name without a slash in front wherever it is: deploy/runs too, with which the quickstart is."""

    def is_copied(path: str) -> bool:
        return not any(
            f"/{path}".startswith(f"{each}/") if each.startswith("/") else each in Path(path).parts
            for each in cluster()["rsync_exclude"]
        )

    assert is_copied("deploy/runs/quickstart.yaml") and not is_copied("runs/mine/ledger.jsonl")

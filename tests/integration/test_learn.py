"""Learning from recorded trajectories is a run: it resumes exactly, verifies and replays, also from text that no policy sampled."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.integration.commands import QUICKSTART, Background, treadwheel
from tests.integration.faults import Run, is_actor
from tests.integration.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.acceptance, pytest.mark.timeout(1800)]
SMALL = (
    "num_steps=8",
    "deterministic=true",
    "buffer.groups_per_step=8",
    "buffer.trajectories_per_group=2",
    "checkpoint.every_steps=3",
    "algorithm={policy_loss: reinforce, advantage: dr_grpo, kl: {loss: {coefficient: 0.01}}}",
    "optimizer.learning_rate=1e-4",
    "metrics.sinks=[console, jsonl]",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Sums with their answers, and with wrong ones."""
    folder = tmp_path_factory.mktemp("data")
    with (folder / "rows.jsonl").open("w") as file:
        for a in range(10, 50):
            question = f"State the final answer to the following arithmetic problem: {a} + {a + 7} ="
            for completion, reward in ((str(2 * a + 7), 1.0), (str(a), 0.0)):
                row = {"messages": [{"role": "user", "content": question}], "completion": completion, "reward": reward}
                file.write(json.dumps(row) + "\n")
    done = treadwheel("import", folder / "rows.jsonl", folder / "data.arrow", QUICKSTART)
    assert done.returncode == 0 and "80 trajectories in 40 groups" in done.stdout, done.stderr
    return folder / "data.arrow"


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory) -> Run:
    run = Run(tmp_path_factory.mktemp("undisturbed") / "run")
    done = treadwheel("learn", data, QUICKSTART, f"run_dir={run.path}", *SMALL)
    assert done.returncode == 0, done.stderr + done.stdout
    return run


def digest(run: Run) -> str:
    return [event["digest"] for event in run.events("published") if event["policy_version"] == 8][-1]


def test_it_prefers_what_was_rewarded_and_leaves_a_checkpoint(undisturbed):
    lines = [json.loads(line) for line in (undisturbed.path / "metrics.jsonl").read_text().splitlines()]
    assert [line["policy_version"] for line in lines] == list(range(1, 9))
    margins = [
        line["learner/policy_logprob_positive_mean"] - line["learner/policy_logprob_negative_mean"] for line in lines
    ]
    assert margins[-1] > margins[0]
    assert all("learner/kl_reference_k1_mean" in line for line in lines), "the run's reference scored them"
    model = undisturbed.path / "checkpoints" / "step-000008" / "model"
    assert (model / "model.safetensors").exists()
    assert "Nothing was measured on held-out prompts" in (model / "README.md").read_text()
    report = (undisturbed.path / "report.html").read_text()
    assert 'data-state="finished">finished<' in report and "nothing was sampled" in report


def test_it_verifies_and_replays(undisturbed):
    assert undisturbed.problems() == ()
    done = treadwheel("replay", undisturbed.path)
    assert done.returncode == 0 and "8 steps replayed" in done.stdout, done.stdout + done.stderr
    assert {event["policy_version"] for event in undisturbed.events("published")} == {0, 3, 6, 8}, (
        "replays compare with these"
    )


def learners_pid(run: Run) -> int | None:
    """As the driver told it last; it may not have heard of the learner yet."""
    file = run.path / "status.json"
    actors = json.loads(file.read_text())["actors"] if file.exists() else ()
    return next((each["pid"] for each in actors if each["actor"] == "learner-0"), None)


def struck(run: Run) -> bool:
    """Whether it lived, and stands still now."""
    pid = learners_pid(run)
    if is_there := is_actor(pid):
        os.kill(pid, signal.SIGSTOP)
    return is_there


def test_with_a_learner_that_hangs_killed_and_resumed_it_equals_the_undisturbed_one(data, undisturbed, tmp_path):
    run = Run(tmp_path / "run")
    command = ("learn", data, QUICKSTART, f"run_dir={run.path}", *SMALL, "supervision.heartbeat_s=1")
    with Background(*command, "supervision.hang_s=10") as driver:
        until(lambda: run.num_recorded() >= 1 and struck(run), process=driver)
        until(lambda: run.events("hang") and run.num_recorded() >= 5, process=driver)
    done = treadwheel(*command)
    assert done.returncode == 0, done.stderr + done.stdout
    assert run.groups() == undisturbed.groups()
    assert digest(run) == digest(undisturbed)


def test_another_configuration_is_refused_and_a_run_of_a_record_is_no_training(undisturbed, tmp_path):
    same = treadwheel("learn", undisturbed.path, QUICKSTART, f"run_dir={undisturbed.path}", *SMALL)
    assert same.returncode == 2 and "belongs to another configuration" in same.stderr
    train = treadwheel("train", QUICKSTART, f"run_dir={tmp_path / 'other'}", f"recorded={undisturbed.path}")
    assert train.returncode == 2 and "start it with `treadwheel learn`" in train.stderr

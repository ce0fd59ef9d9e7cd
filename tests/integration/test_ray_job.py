"""As a Ray job, with the README's own line on a cluster that asks for a token."""

import json
import re

import pytest

from tests.integration.commands import QUICKSTART, ROOT, SMALL, run, treadwheel

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


def readme_line() -> str:
    """`ray job submit ...`, on one line."""
    found = re.search(r"^ray job submit .*?[^\\]\n", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert found, "the README shows no `ray job submit`"
    return found.group().replace("\\\n", " ")


def submission(dashboard: str, *overrides: str) -> tuple[str, ...]:
    """The README's line with another port, and overrides at its end."""
    line = readme_line()
    assert "http://127.0.0.1:8265" in line
    return "bash", "-c", " ".join([line.replace("http://127.0.0.1:8265", dashboard).strip(), *overrides])


@pytest.mark.engine
@pytest.mark.slow
def test_the_line_in_the_readme_trains(head, tmp_path):
    small = [f"'{each}'" for each in (*SMALL, "num_steps=2")]
    job = run(*submission(head.dashboard, *small, f"run_dir={tmp_path / 'run'}"), env=head.env)
    assert job.returncode == 0, job.stdout + job.stderr
    assert "succeeded" in job.stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["num_steps"] == 2


def test_a_wrong_token_is_refused(head, tmp_path):
    wrong = {**head.env, "RAY_AUTH_TOKEN": "0" * 64}
    job = run(*submission(head.dashboard, f"run_dir={tmp_path / 'run'}"), env=wrong)
    assert job.returncode != 0
    assert re.search(r"401|403|[Uu]nauthori[sz]ed|Forbidden|[Ii]nvalid.*token", job.stdout + job.stderr), job.stderr
    assert not (tmp_path / "run").exists()


def test_a_driver_with_a_wrong_token_is_told_so(head, tmp_path):
    wrong = {**head.env, "RAY_AUTH_TOKEN": "0" * 64}
    result = treadwheel("train", QUICKSTART, f"run_dir={tmp_path / 'run'}", "--address", head.address, env=wrong)
    assert result.returncode == 2, result.stdout + result.stderr
    assert head.address in result.stderr
    assert "Traceback" not in result.stderr


def test_more_than_the_cluster_has_is_refused_once_it_is_known(head, tmp_path):
    result = treadwheel(
        "train",
        QUICKSTART,
        f"run_dir={tmp_path / 'run'}",
        "rollout.gpus_per_worker=8",
        "--address",
        head.address,
        env=head.env,
    )
    assert result.returncode == 2, result.stdout + result.stderr
    assert "8 GPUs asked for, the cluster has" in result.stderr


def test_a_cluster_that_does_not_answer_is_named(tmp_path):
    result = treadwheel("train", QUICKSTART, f"run_dir={tmp_path / 'run'}", "--address", "127.0.0.1:1")
    assert result.returncode == 2, result.stdout + result.stderr
    assert "127.0.0.1:1" in result.stderr
    assert "Traceback" not in result.stderr

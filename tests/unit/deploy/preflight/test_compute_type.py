"""`model.dtype: auto` becomes a type before anything starts, and stays that type."""

from typing import Any

import pytest

import learner.model.compute_type as machine
from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from deploy.config.loading import resolved_yaml
from deploy.preflight import compute_type
from deploy.preflight.compute_type import with_compute_type
from tests.fakes import run_config

ON_GPUS = {"learner": {"gpus_per_rank": 1}, "rollout": {"gpus_per_worker": 1}}


@pytest.fixture(autouse=True)
def own_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def asked(monkeypatch) -> dict[str, bool]:
    """What is asked, and how fast it is."""
    fast = {"processor": True, "GPUs": True}
    monkeypatch.setattr(machine, "is_bfloat16_fast_on_cpu", lambda: fast["processor"])
    monkeypatch.setattr(compute_type, "_are_gpus_fast", lambda: fast["GPUs"])
    return fast


def automatic(folder: Any, **sections: Any) -> RunConfig:
    return run_config(run_dir=str(folder / "run"), **{"model": {"path": "model", "dtype": "auto"}, **sections})


@pytest.mark.parametrize(
    ("sections", "slow", "dtype"),
    [
        ({}, None, "bfloat16"),
        ({}, "processor", "float32"),
        ({}, "GPUs", "bfloat16"),
        (ON_GPUS, "GPUs", "float32"),
        (ON_GPUS, "processor", "bfloat16"),
        ({"rollout": {"gpus_per_worker": 1}}, "processor", "float32"),
        ({"rollout": {"gpus_per_worker": 1}}, "GPUs", "float32"),
        ({"rollout": {"gpus_per_worker": 1}, "recorded": "runs/one"}, "GPUs", "bfloat16"),
    ],
)
def test_it_is_the_type_that_all_who_compute_with_the_model_multiply_fast(tmp_path, asked, sections, slow, dtype):
    if slow is not None:
        asked[slow] = False
    config, why = with_compute_type(automatic(tmp_path, **sections), address=None)
    assert config.model.dtype == dtype and why is not None and why.startswith(f"{dtype}, ")


def test_a_type_that_the_run_file_names_is_not_asked_for(tmp_path):
    named = automatic(tmp_path, model={"path": "model", "dtype": "float32"})
    assert with_compute_type(named, address="ray://head:10001") == (named, None)


def test_a_run_keeps_the_type_that_it_began_with(tmp_path, asked):
    began, _ = with_compute_type(automatic(tmp_path), address=None)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.yaml").write_text(resolved_yaml(began))
    asked["processor"] = False
    resumed, why = with_compute_type(automatic(tmp_path), address="ray://head:10001")
    assert resumed == began and resumed.model.dtype == "bfloat16"
    assert why == f"bfloat16, with which the run in '{tmp_path}/run' began (model.dtype=auto)"


def test_the_nodes_of_a_cluster_that_runs_already_cannot_be_asked(tmp_path, asked, monkeypatch):
    with pytest.raises(ConfigError, match=r"model\.dtype='auto' on a running cluster: .* write model\.dtype=bfloat16"):
        with_compute_type(automatic(tmp_path), address="ray://head:10001")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ConfigError, match="cannot be asked"):
        with_compute_type(automatic(tmp_path), address=None)


@pytest.mark.slow
def test_gpus_are_asked_in_a_process_of_its_own():
    assert compute_type._are_gpus_fast() is machine.is_bfloat16_fast_on_gpus()


def test_a_damaged_run_is_named_by_its_file(tmp_path, asked):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.yaml").write_text("model: {dtype")
    with pytest.raises(ConfigError, match=r"run\.yaml line 1, column 14 cannot be read as YAML"):
        with_compute_type(automatic(tmp_path), address=None)

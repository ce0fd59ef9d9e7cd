"""What an evaluation reads is what was saved."""

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cluster.contracts.config import ModelConfig, RunConfig
from cluster.contracts.errors import CheckpointError, ConfigError, StorageError
from cluster.record.ledger import Ledger
from cluster.record.run_directory import RunDirectory
from cluster.record.storage import Storage
from deploy import launch
from deploy.config.loading import resolved_yaml, validated
from deploy.evaluation import configured, print_scores, warnings
from deploy.preflight.model import check_folder
from deploy.replay import replay
from deploy.reports.verify import verify
from learner.checkpoint import reading, writing
from learner.checkpoint.manifest import Manifest
from learner.checkpoint.places import Place
from tests.object_store import s3

CONFIG = validated({"model": {"path": "none"}, "prompts": "file", "evaluation": {"prompts": "file"}})


def evaluate(target: str, overrides: Sequence[str] = ()) -> None:
    with configured(target, overrides) as config:
        launch.evaluate(config)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with the checkpoints of steps 1 and 2."""
    RunDirectory(str(tmp_path)).write_file("run.yaml", resolved_yaml(CONFIG).encode())
    for step in (1, 2):
        directory = tmp_path / "checkpoints" / f"step-{step:06d}"
        aside = writing.begin(directory)
        model = aside / "model" / "model.safetensors"
        entries = {"model/model.safetensors": writing.write_tensors(model, {"w": torch.zeros(4)})}
        (aside / "model" / "config.json").write_text("{}")
        entries["model/config.json"] = writing.seal(aside / "model" / "config.json")
        manifest = Manifest(
            policy_version=step, num_ranks=1, parameters_digest="p", metric=None, learner={}, extra={}, files={}
        )
        writing.commit(aside, directory, manifest.sealed(entries))
    return tmp_path


@pytest.fixture
def flipped(run: Path) -> Path:
    """The same with one bit of step 2's weights flipped."""
    weights = run / "checkpoints" / "step-000002" / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    return run


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that come to be evaluated."""
    paths: list[str] = []

    async def scored(production: None, *, version: int, log: object) -> dict[str, float]:
        return {}

    def evaluator(config: RunConfig) -> SimpleNamespace:
        paths.append(config.model.path)
        return SimpleNamespace(run=scored)

    monkeypatch.setattr(launch, "make_evaluator", evaluator)
    monkeypatch.setattr(launch, "connected", lambda address: contextlib.nullcontext())
    monkeypatch.setattr(launch, "cluster", lambda *_, **__: contextlib.nullcontext(SimpleNamespace(production=None)))
    return paths


def test_a_run_stands_for_its_last_checkpoint_and_a_checkpoint_for_itself(run: Path, evaluated: list[str]):
    evaluate(str(run))
    evaluate(str(run / "checkpoints" / "step-000001"))
    assert evaluated == [str(run / "checkpoints" / f"step-00000{step}" / "model") for step in (2, 1)]


def test_a_run_in_an_object_store_stands_for_its_last_checkpoint_too(run: Path, evaluated: list[str]):
    with s3("evaluated"):
        for path in run.rglob("*"):
            if path.is_file():
                name = str(path.relative_to(run)).replace("/model/", "/3f9c/model/")  # as a save leaves them
                Storage("s3://evaluated").upload(f"run/{name}", str(path))
        Storage("s3://evaluated").write_file("run/checkpoints/step-000009/model/torn", b"")
        evaluate("s3://evaluated/run")
        evaluate("s3://evaluated/run/checkpoints/step-000001/")
    assert evaluated == [f"s3://evaluated/run/checkpoints/step-00000{step}/model" for step in (2, 1)]


def test_an_evaluation_needs_the_settings_again_that_the_run_hid(run: Path, evaluated: list[str]):
    values = {**CONFIG.model_dump(mode="json"), "reward": {"judge": {"name": "mine:judge", "api_key": "k-1"}}}
    RunDirectory(str(run)).write_file("run.yaml", resolved_yaml(validated(values)).encode())
    with pytest.raises(ConfigError, match=r"run\.yaml: the value of reward\.judge\.api_key is hidden there"):
        evaluate(str(run))
    evaluate(str(run), ["reward.judge.api_key=k-1"])
    assert len(evaluated) == 1


def test_a_checkpoint_that_was_renamed_is_out_of_the_way(run: Path, evaluated: list[str]):
    checkpoints = run / "checkpoints"
    (checkpoints / "step-000002").rename(checkpoints / "step-000002.bad")
    evaluate(str(run))
    assert evaluated == [str(checkpoints / "step-000001" / "model")]
    assert [place.name for place in reading.checkpoints(Storage(str(checkpoints)))] == ["step-000001"]


def test_one_flipped_bit_is_refused_before_anything_starts(flipped: Path, evaluated: list[str]):
    for target in (flipped, flipped / "checkpoints" / "step-000002"):
        with pytest.raises(
            CheckpointError, match=r"step-000002 was altered: model/model\.safetensors has another digest"
        ):
            evaluate(str(target))
    assert evaluated == []
    evaluate(str(flipped / "checkpoints" / "step-000001"))
    assert len(evaluated) == 1


def test_verification_names_the_file_with_the_flipped_bit(flipped: Path):
    verdict = verify(RunDirectory(str(flipped)), CONFIG)
    altered, no_ledger = verdict.problems
    assert "step-000002 was altered: model/model.safetensors has another digest" in altered
    assert "the newest checkpoint is of step 2" in no_ledger
    assert str(verdict).endswith("0 tokens, 2 checkpoints: 2 problems")


def test_a_run_does_not_start_from_a_checkpoint_with_a_flipped_bit(flipped: Path):
    checkpoints = flipped / "checkpoints"
    check_folder(str(checkpoints / "step-000001" / "model"), field="model.path")
    with pytest.raises(CheckpointError, match="step-000002 was altered"):
        check_folder(str(checkpoints / "step-000002" / "model"), field="model.path")


def test_a_manifest_that_may_not_be_read_is_named(run: Path, monkeypatch):
    def deny(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", deny)
    with pytest.raises(StorageError, match=r"step-000002/manifest\.json: Permission denied; fix its permissions"):
        reading.verify_model(run / "checkpoints" / "step-000002" / "model")


def test_a_checkpoint_without_a_manifest_is_not_evaluated(run: Path):
    """Seen before: a part of a copy was evaluated, and nothing proved that its weights were the saved ones."""
    (run / "checkpoints" / "step-000002" / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=r"step-000002' has no manifest\.json: it was never finished, or copied"):
        evaluate(str(run))


@pytest.mark.parametrize("section", ["model", "reference"])
def test_a_run_that_python_starts_is_refused_too(
    flipped: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, section: str
):
    async def never(*_: object, **__: object) -> None:
        raise AssertionError("it started")

    monkeypatch.setattr(launch, "_train", never)
    model = {section: {"path": str(flipped / "checkpoints" / "step-000002" / "model")}}
    run_dir = str(tmp_path_factory.mktemp("run"))
    config = validated({"model": {"path": "none"}, "prompts": "file", "run_dir": run_dir} | model)
    with pytest.raises(CheckpointError, match="step-000002 was altered"):
        launch.train(config)


def test_what_a_model_is_not_read_from_does_not_matter_to_it(run: Path):
    checkpoint = run / "checkpoints" / "step-000002"
    aside = writing.begin(run / "checkpoints" / "step-000003")
    shutil.copytree(checkpoint, aside, dirs_exist_ok=True)
    entries = reading.read_manifest(Place.of(checkpoint)).files | {
        "state.safetensors": writing.write_tensors(aside / "state.safetensors", {"w": torch.zeros(1)})
    }
    saved = run / "checkpoints" / "step-000003"
    writing.commit(aside, saved, reading.read_manifest(Place.of(checkpoint)).sealed(entries))
    (saved / "state.safetensors").write_bytes(b"")
    reading.verify_model(saved / "model")
    with pytest.raises(CheckpointError, match=r"state\.safetensors has 0 bytes"):
        reading.verify(Place.of(saved))


def test_a_checkpoint_is_known_behind_a_symbolic_link_and_from_inside(flipped: Path, monkeypatch: pytest.MonkeyPatch):
    model = flipped / "checkpoints" / "step-000002" / "model"
    (flipped / "best").symlink_to(model)
    monkeypatch.chdir(model)
    for path in (flipped / "best", Path()):
        with pytest.raises(CheckpointError, match="step-000002 was altered"):
            reading.verify_model(path)


def test_a_manifest_of_another_program_next_to_a_model_is_none_of_ours(tmp_path: Path):
    (tmp_path / "manifest.json").write_text('{"format": "other-1", "files": {}}')
    for name in ("model", "llama"):
        (tmp_path / name).mkdir()
        reading.verify_model(tmp_path / name)


def test_a_model_in_the_home_of_nobody_is_none_of_ours():
    reading.verify_model(Path("~nobody-here/model"))


def test_a_model_that_lies_in_a_checkpoint_but_is_not_its_own_is_none_of_its_business(flipped: Path):
    other = flipped / "checkpoints" / "step-000002" / "converted"
    other.mkdir()
    reading.verify_model(other)


def test_a_replay_does_not_start_from_a_flipped_bit(flipped: Path):
    directory = RunDirectory(str(flipped))
    directory.write_file("trajectories/none", b"")
    Ledger(directory).append(groups=[0], trajectories="trajectories/none", trajectories_digest="none")
    model = flipped / "checkpoints" / "step-000002" / "model"
    config = CONFIG.model_copy(update={"model": ModelConfig(path=str(model))})
    with pytest.raises(CheckpointError, match="step-000002 was altered"):
        replay(directory, config)


def test_a_replay_into_a_folder_that_exists_is_refused_before_it_begins(run: Path):
    directory = RunDirectory(str(run))
    directory.write_file("trajectories/none", b"")
    Ledger(directory).append(groups=[0], trajectories="trajectories/none", trajectories_digest="none")
    model = run / "checkpoints" / "step-000002" / "model"
    config = CONFIG.model_copy(update={"model": ModelConfig(path=str(model))})
    with pytest.raises(ConfigError, match=r"--out='.*checkpoints' exists; name another one"):
        replay(directory, config, out=str(run / "checkpoints"))


def test_without_held_out_prompts_the_way_out_is_named(run: Path, evaluated: list[str]):
    with pytest.raises(ConfigError, match=r"has no evaluation\.prompts; name a held-out source"):
        evaluate(str(run), ["evaluation.prompts=null"])
    assert evaluated == []


def test_a_folder_is_named_as_it_is_whatever_yaml_makes_of_its_name(run: Path, evaluated: list[str]):
    named = run.rename(run.with_name("2024-01-31 #2: mine"))
    evaluate(str(named))
    assert evaluated == [str(named / "checkpoints" / "step-000002" / "model")]


@pytest.mark.parametrize("override", ["model.path=Org/other", "model={path: Org/other}", "model.revision=v2"])
def test_a_checkpoint_is_not_evaluated_as_another_model(run: Path, evaluated: list[str], override: str):
    """Seen before: the override was dropped, and the checkpoint's scores came back as those of the other model."""
    with pytest.raises(ConfigError, match=r"names other weights than those of .*use it with a run file"):
        evaluate(str(run), [override])
    assert evaluated == []


def test_numbers_of_prompts_are_printed_in_full(capsys: pytest.CaptureFixture[str]):
    print_scores("a", {"eval/num_prompts": 12345.0, "eval/accuracy": 0.123456, "eval/reward_stderr": float("nan")})
    assert capsys.readouterr().out == "a: eval/accuracy 0.1235  eval/num_prompts 12345  eval/reward_stderr nan\n"


def rated(**sections: dict[str, object]) -> RunConfig:
    return validated({"model": {"path": "none"}, "prompts": "file", "evaluation": {"prompts": "file"}} | sections)


def test_scores_of_two_judges_come_with_a_warning_that_names_the_settings():
    """Seen before: a run's scores, by a judge given on the command line, stood next to those of the run file's judge without a word."""
    started, trained = rated(), rated(reward={"judge": "mine:short"}, sampling={"top_k": 5})
    assert warnings({"run.yaml": started, "runs/a": trained, "runs/b": started}) == [
        "warning: the scores of run.yaml and runs/a are not comparable: they differ in reward.judge.name, sampling.top_k"
    ]


def test_settings_that_change_no_score_bring_no_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "held_out.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    source = {"name": "file", "column": "q"}
    started = rated(
        evaluation={"prompts": {**source, "path": "./held_out.jsonl"}, "every_steps": 2}, reward={"num_services": 2}
    )
    trained = rated(
        evaluation={"prompts": {**source, "path": str(tmp_path / "held_out.jsonl")}},
        reward={"timeout_s": 5.0},
        optimizer={"learning_rate": 1e-3},
    )
    assert warnings({"run.yaml": started, "runs/a": trained}) == []

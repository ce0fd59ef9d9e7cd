"""A run keeps its models, its tokenizer and its rubrics."""

import json

import huggingface_hub
import pytest

from cluster.contracts.config import ModelConfig
from cluster.contracts.errors import ConfigError
from cluster.record.run_directory import PASSPORT, RunDirectory
from deploy.config.loading import validated
from deploy.named_files import refuse_other_files, tokenizer_digest
from deploy.reports.passport import write_passport
from tests.models import make_tiny_model


def configured(folder, *overrides: str):
    return validated({"model": {"path": str(folder / "model")}, "prompts": "file"}, overrides)


def begun(folder, config) -> RunDirectory:
    """A run directory with the passport of a run that began with these files."""
    run_dir = RunDirectory(str(folder / "run"))
    write_passport(run_dir, config, formula={"value": {}}, learner={}, weights_digest="d")
    return run_dir


def test_a_run_whose_files_are_as_they_were_is_not_refused(tmp_path):
    make_tiny_model(tmp_path / "model")
    config = configured(tmp_path)
    run_dir = begun(tmp_path, config)
    (tmp_path / "model").rename(tmp_path / "moved")
    (tmp_path / "model").symlink_to(tmp_path / "moved")
    refuse_other_files(run_dir, config)


def test_a_resume_on_another_model_under_the_same_path_is_refused(tmp_path):
    """Seen in review: a run of full weights went on with another reference for its KL, without a word."""
    make_tiny_model(tmp_path / "model")
    config = configured(tmp_path)
    run_dir = begun(tmp_path, config)
    make_tiny_model(tmp_path / "model", seed=1)
    with pytest.raises(ConfigError, match=r"model\.path='.*model': its weights changed since .* then, .* now; bring"):
        refuse_other_files(run_dir, config)


def test_weights_of_which_a_file_is_not_there_yet_are_not_compared(tmp_path):
    """A new machine may have a part of a hub's files."""
    make_tiny_model(tmp_path / "model")
    config = configured(tmp_path)
    run_dir = begun(tmp_path, config)
    make_tiny_model(tmp_path / "model", seed=1)
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / names[0])
    index = {"weight_map": {str(number): name for number, name in enumerate(names)}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    refuse_other_files(run_dir, config)


def test_a_resume_with_a_template_that_was_added_is_refused(tmp_path):
    make_tiny_model(tmp_path / "model")
    config = configured(tmp_path)
    run_dir = begun(tmp_path, config)
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(ConfigError, match=r"model\.path='.*model': its tokenizer changed"):
        refuse_other_files(run_dir, config)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ("reference={path: OTHER}", r"reference\.path"),
        ("reward={judge: {name: llm_judge, server: s}, servers: {s: {path: OTHER}}}", r"reward\.servers\.s\.path"),
        ("algorithm={advantage: gae, value: {path: OTHER}}", r"algorithm\.value\.path"),
    ],
)
def test_the_setting_of_another_model_that_changed_is_named(tmp_path, settings, field):
    make_tiny_model(tmp_path / "model")
    make_tiny_model(tmp_path / "other")
    config = configured(tmp_path, settings.replace("OTHER", str(tmp_path / "other")))
    run_dir = begun(tmp_path, config)
    make_tiny_model(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match=rf"{field}='.*other': its weights changed"):
        refuse_other_files(run_dir, config)


def test_a_resume_with_another_rubric_is_refused(tmp_path):
    make_tiny_model(tmp_path / "model")
    (tmp_path / "rubric.yaml").write_text("criteria 0")
    judge = {"name": "llm_judge", "server": "s", "rubric": str(tmp_path / "rubric.yaml")}
    servers = {"s": {"path": str(tmp_path / "model")}}
    config = configured(tmp_path, f"reward={json.dumps({'judge': judge, 'servers': servers})}")
    run_dir = begun(tmp_path, config)
    (tmp_path / "rubric.yaml").write_text("criteria 1")
    with pytest.raises(ConfigError, match=r"reward\.judge\.rubric='.*rubric.yaml': its text changed"):
        refuse_other_files(run_dir, config)


def test_a_run_whose_passport_does_not_name_its_files_resumes(tmp_path):
    make_tiny_model(tmp_path / "model")
    (tmp_path / PASSPORT).write_text(json.dumps({"mathematics": {"model": {"tokenizer_digest": None}}}))
    refuse_other_files(RunDirectory(str(tmp_path)), configured(tmp_path))


def hub(root, commit: str, **files: str) -> None:
    """A cache of the hub with the model `org/name`, whose default branch is at `commit`."""
    folder = root / "models--org--name"
    for name, content in files.items():
        (place := folder / "snapshots" / commit).mkdir(parents=True, exist_ok=True)
        (place / f"{name}.json").write_text(content)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(commit)


def test_a_tokenizer_file_of_the_hub_may_come_later_and_may_not_change(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    config = validated({"model": {"path": "org/name"}, "prompts": "file"})
    hub(tmp_path / "hub", "0" * 40, tokenizer_config="{}")
    run_dir = begun(tmp_path, config)
    hub(tmp_path / "hub", "0" * 40, added_tokens="{}")
    refuse_other_files(run_dir, config)
    hub(tmp_path / "hub", "1" * 40, tokenizer_config='{"chat_template": ""}')
    with pytest.raises(ConfigError, match=r"model\.path='org/name': its tokenizer_config\.json changed"):
        refuse_other_files(run_dir, config)


def test_the_tokenizer_is_that_of_the_pinned_revision_and_not_of_the_default_branch(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for number, name in enumerate(("main", "pinned")):
        commit = str(number) * 40
        folder = tmp_path / "models--org--name" / "snapshots" / commit
        folder.mkdir(parents=True)
        (folder / "tokenizer_config.json").write_text(f'{{"of": "{name}"}}')
        (refs := tmp_path / "models--org--name" / "refs").mkdir(exist_ok=True)
        (refs / name).write_text(commit)
    digests = [tokenizer_digest(ModelConfig(path="org/name", revision=each)) for each in (None, "main", "pinned")]
    assert digests[0] == digests[1] != digests[2]
    assert tokenizer_digest(ModelConfig(path="org/other")) is None


def test_a_folder_beside_the_tokenizer_is_none_of_its_files(tmp_path):
    make_tiny_model(tmp_path)
    before = tokenizer_digest(ModelConfig(path=str(tmp_path)))
    (tmp_path / "tokenized_data").mkdir()
    assert tokenizer_digest(ModelConfig(path=str(tmp_path))) == before is not None

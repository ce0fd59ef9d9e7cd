import json

import pytest
import torch
from safetensors.torch import save_file

from cluster.contracts.config import ModelConfig
from cluster.contracts.errors import ConfigError
from cluster.weights.model_files import fingerprint, model_file, refuse_unpinned_code
from tests.models import make_tiny_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def fingerprint_of(folder) -> str | None:
    return fingerprint(ModelConfig(path=str(folder)))


def test_equal_weights_have_one_fingerprint_and_others_another(tmp_path):
    one, same, other = (make_tiny_model(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert fingerprint_of(one) == fingerprint_of(same) != fingerprint_of(other)


def test_how_the_files_are_cut_does_not_matter(tmp_path):
    tensors = {"a": torch.arange(6.0), "b": torch.ones(2, 3)}
    files = {"a": "2.safetensors", "b": "1.safetensors"}
    for name in ("whole", "divided"):
        (tmp_path / name).mkdir()
    save_file(tensors, tmp_path / "whole" / "model.safetensors", metadata={"format": "pt"})
    for name, tensor in tensors.items():
        save_file({name: tensor}, tmp_path / "divided" / files[name])
    (tmp_path / "divided" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert fingerprint_of(tmp_path / "whole") == fingerprint_of(tmp_path / "divided") is not None


def test_a_tensor_of_another_name_shape_or_type_makes_another_model(tmp_path):
    models = {
        "first": {"a": torch.zeros(6)},
        "name": {"b": torch.zeros(6)},
        "shape": {"a": torch.zeros(2, 3)},
        "type": {"a": torch.zeros(6, dtype=torch.int32)},
    }
    for name, tensors in models.items():
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    assert len({fingerprint_of(tmp_path / name) for name in models}) == 4


def test_files_of_the_hub_are_those_of_the_revision_and_a_file_that_the_hub_lacks_is_none(tmp_path, monkeypatch):
    """Each divided model lacks the single file, and the cache says so."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cache = tmp_path / "models--org--model"
    for revision, content in ((COMMIT, "old"), (COMMIT[::-1], "new")):
        (cache / "snapshots" / revision).mkdir(parents=True)
        (cache / "snapshots" / revision / "README.md").write_text(content)
        (cache / ".no_exist" / revision).mkdir(parents=True)
        (cache / ".no_exist" / revision / "model.safetensors").touch()
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMIT[::-1])
    for revision, content in ((COMMIT, "old"), (None, "new")):
        model = ModelConfig(path="org/model", revision=revision)
        found = model_file(model, "README.md")
        assert found is not None and found.read_text() == content
        assert model_file(model, "model.safetensors") is None and fingerprint(model) is None


def test_a_folder_may_be_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "README.md").touch()
    assert model_file(ModelConfig(path="~"), "README.md") == tmp_path / "README.md"


def test_a_model_without_safetensors_has_none(tmp_path):
    assert fingerprint_of(tmp_path) is None


def test_a_folder_that_is_gone_has_no_files(tmp_path):
    """Seen before: `report` of a run whose model had been moved ended with a traceback, since the hub refuses such a name."""
    assert model_file(ModelConfig(path=str(tmp_path / "gone")), "README.md") is None


@pytest.mark.parametrize("revision", [None, "main", "v1.0", COMMIT[:12], COMMIT + "0", COMMIT.upper()])
def test_code_from_the_hub_needs_a_commit(revision):
    with pytest.raises(
        ConfigError, match=r"model\.trust_remote_code=true with model\.revision=.*40 hexadecimal digits"
    ):
        refuse_unpinned_code(ModelConfig(path="org/model", revision=revision, trust_remote_code=True))


def test_code_of_a_commit_and_of_a_folder_may_run(tmp_path):
    refuse_unpinned_code(ModelConfig(path="org/model", revision=COMMIT, trust_remote_code=True))
    refuse_unpinned_code(ModelConfig(path=str(tmp_path), trust_remote_code=True))
    refuse_unpinned_code(ModelConfig(path="org/model"))  # no code runs

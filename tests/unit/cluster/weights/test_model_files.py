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
    for name in ("whole", "divided"):
        (tmp_path / name).mkdir()
    save_file(tensors, tmp_path / "whole" / "model.safetensors", metadata={"format": "pt"})
    for name, tensor in tensors.items():
        save_file({name: tensor}, tmp_path / "divided" / f"{name}.safetensors")
    (tmp_path / "divided" / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}'
    )
    assert fingerprint_of(tmp_path / "whole") == fingerprint_of(tmp_path / "divided") is not None


def test_a_model_without_safetensors_has_none(tmp_path):
    assert fingerprint_of(tmp_path) is None


def test_a_folder_that_is_gone_has_no_files(tmp_path):
    """Seen before: `report` of a run whose model had been moved ended with a traceback, since the hub refuses such a name."""
    assert model_file(ModelConfig(path=str(tmp_path / "gone")), "README.md") is None


@pytest.mark.parametrize("revision", [None, "main", "v1.0", COMMIT[:12], COMMIT.upper()])
def test_code_from_the_hub_needs_a_commit(revision):
    with pytest.raises(
        ConfigError, match=r"model\.trust_remote_code=true with model\.revision=.*40 hexadecimal digits"
    ):
        refuse_unpinned_code(ModelConfig(path="org/model", revision=revision, trust_remote_code=True))


def test_code_of_a_commit_and_of_a_folder_may_run(tmp_path):
    refuse_unpinned_code(ModelConfig(path="org/model", revision=COMMIT, trust_remote_code=True))
    refuse_unpinned_code(ModelConfig(path=str(tmp_path), trust_remote_code=True))

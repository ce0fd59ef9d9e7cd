import torch
from safetensors.torch import save_file

from cluster.contracts.config import ModelConfig
from cluster.weights.model_files import fingerprint
from tests.models import make_tiny_model


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

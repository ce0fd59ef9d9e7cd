from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from learner.checkpoint import model_folder


def test_large_models_are_split_into_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model_folder, "MAX_FILE_BYTES", 40)
    named = [(name, torch.full((8,), float(i))) for i, name in enumerate("abc")]
    entries = model_folder.write_weights(tmp_path, named)
    assert sorted(entries) == [
        *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    assert load_file(tmp_path / "model-00002-of-00003.safetensors")["b"].tolist() == [1.0] * 8

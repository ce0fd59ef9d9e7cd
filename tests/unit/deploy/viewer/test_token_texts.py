"""Each token as the reader sees it: text, bytes where it is a part of a character, and never what a tokenizer would guess."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from cluster.record.run_directory import RunDirectory
from deploy.viewer.runs import Run
from deploy.viewer.token_texts import TokenTexts, token_texts
from tests.object_store import s3
from tests.unit.deploy.viewer.run_files import write_run

BYTE_LEVEL = {"<|end|>": 0, "Hi": 1, "Ġthere": 2, "âĤ": 3, "¬": 4, "Ċ": 5, "ÿ": 6}
"""âĤ and ¬ are the letters of E2 82 and AC, the euro sign; ÿ that of FF, which is in no character."""
FALLBACK = {"<0xE2>": 0, "<0x82>": 1, "<0xAC>": 2, "▁Hi": 3}


def _tokenizer(vocabulary: dict[str, int], *, decoder: object, special: tuple[str, ...] = ()) -> str:
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.decoder = decoder  # pyright: ignore[reportAttributeAccessIssue]
    made.add_special_tokens(list(special))
    return made.to_str()


def _byte_level() -> str:
    return _tokenizer(BYTE_LEVEL, decoder=decoders.ByteLevel(), special=("<|end|>",))


def test_spaces_lines_and_special_tokens_are_shown_as_they_are():
    shown = TokenTexts(_byte_level()).shown([1, 2, 5, 0])
    assert (shown.texts, shown.special, shown.broken) == (["Hi", " there", "\n", "<|end|>"], [3], [])


def test_parts_of_a_character_are_bytes_and_name_the_character():
    shown = TokenTexts(_byte_level()).shown([1, 3, 4, 1])
    assert shown.texts == ["Hi", "⟨E2⟩⟨82⟩", "⟨AC⟩", "Hi"]
    assert (shown.broken, shown.characters) == ([1, 2], {1: "€", 2: "€"})


def test_bytes_that_are_no_character_name_none():
    shown = TokenTexts(_byte_level()).shown([3, 1, 4, 6])
    assert shown.texts == ["⟨E2⟩⟨82⟩", "Hi", "⟨AC⟩", "⟨FF⟩"]
    assert shown.characters == {}


def test_byte_fallback_is_read_too():
    shown = TokenTexts(_tokenizer(FALLBACK, decoder=decoders.ByteFallback())).shown([3, 0, 1, 2])
    assert shown.texts == [" Hi", "⟨E2⟩", "⟨82⟩", "⟨AC⟩"]
    assert shown.characters == {1: "€", 2: "€", 3: "€"}


def test_a_number_without_a_token_is_shown_as_the_number():
    assert TokenTexts(_byte_level()).shown([99]).texts == ["⟨99⟩"]


@pytest.mark.parametrize("place", ["run/checkpoints/step-000003/model", "model"])
def test_the_tokenizer_is_found_in_a_checkpoint_or_beside_the_model(tmp_path, place, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = write_run(tmp_path / "run")
    monkeypatch.setenv("HOME", str(tmp_path))
    (folder / "run.yaml").write_text(json.dumps({"model": {"path": "~/model"}}))
    run = Run("run", RunDirectory(str(folder)))
    assert token_texts(run) is None
    where = Path(tmp_path, place)
    where.mkdir(parents=True)
    (where / "tokenizer.json").write_text(_byte_level())
    found = token_texts(run)
    assert found and found.shown([1]).texts == ["Hi"]


def test_of_several_checkpoints_the_newest_has_the_tokenizer(tmp_path):
    folder = write_run(tmp_path / "run")
    for step, word in ((2, "old"), (10, "new")):
        model = folder / f"checkpoints/step-{step:06d}/model"
        model.mkdir(parents=True)
        (model / "tokenizer.json").write_text(_tokenizer({word: 0}, decoder=decoders.ByteLevel()))
    found = token_texts(Run("run", RunDirectory(str(folder))))
    assert found and found.shown([0]).texts == ["new"]


def test_a_run_that_takes_the_place_of_another_is_read_by_its_own_tokenizer(tmp_path):
    def begin(vocabulary: dict[str, int]) -> None:
        write_run(tmp_path / "run")
        model = tmp_path / "run" / "checkpoints" / "step-000003" / "model"
        model.mkdir(parents=True)
        (model / "tokenizer.json").write_text(_tokenizer(vocabulary, decoder=decoders.ByteLevel()))

    run = Run("run", RunDirectory(str(tmp_path / "run")))
    texts: list[str] = []
    for word in ("old", "other"):
        begin({word: 0})
        found = token_texts(run)
        texts += found.shown([0]).texts if found else []
        shutil.rmtree(tmp_path / "run")
    assert texts == ["old", "other"]


def test_a_tokenizer_is_read_once(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run")
    (folder / "run.yaml").write_text(json.dumps({"model": {"path": str(folder)}}))
    (folder / "tokenizer.json").write_text(_byte_level())
    run = Run("run", RunDirectory(str(folder)))
    first = token_texts(run)
    monkeypatch.setattr("deploy.viewer.token_texts._parsed", None)
    assert first is not None and token_texts(run) is first


def test_in_an_object_store_the_tokenizer_lies_where_the_manifest_says():
    with s3("tokenizers"):
        directory = RunDirectory("s3://tokenizers/run")
        folder = "checkpoints/step-000003"
        directory.write_file("run.yaml", json.dumps({"model": {"path": "org/model"}}).encode())
        directory.write_json(f"{folder}/manifest.json", {"folder": "save-0a1b"})
        directory.write_file(f"{folder}/save-0a1b/model/tokenizer.json", _byte_level().encode())
        found = token_texts(Run("run", directory))
    assert found and found.shown([2]).texts == [" there"]

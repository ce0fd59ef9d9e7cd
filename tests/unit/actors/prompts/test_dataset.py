"""Data sets: a folder that `datasets` saved is read as its rows, and one of the hub is pinned by a commit."""

import sys
from types import SimpleNamespace

import pyarrow as pa
import pytest

from actors.prompts.dataset import dataset
from cluster.contracts.errors import ConfigError
from tests.unit.actors.prompts.saved_dataset import save

ROWS = [{"question": "1 + 1 =", "answer": 2}, {"question": "2 + 2 =", "answer": 4}]


def test_rows_of_a_saved_split_are_prompts_and_their_columns(tmp_path, monkeypatch):
    save(tmp_path / "saved", [], monkeypatch, train=ROWS, test=ROWS[:1])
    source = dataset(path=str(tmp_path / "saved"), column="question", system_prompt="Be brief.")
    assert len(source) == 2
    assert source[1].prompt_id == "dataset/saved/train/1"
    assert source[1].messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2 ="}]
    assert source[1].columns == {"answer": 4}


def test_a_folder_below_home_is_found(tmp_path, monkeypatch):
    save(tmp_path / "saved", ROWS, monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert dataset(path="~/saved", column="question")[0].prompt_id == "dataset/saved/train/0"


@pytest.mark.parametrize("own", ["train", "train[:2]"])
def test_a_folder_of_one_split_is_no_other_split(tmp_path, monkeypatch, own):
    """Seen before: the training rows were evaluated as held out."""
    save(tmp_path / "saved", ROWS, monkeypatch, split=own)
    for asked in ("train", own):
        assert len(dataset(path=str(tmp_path / "saved"), column="question", split=asked)) == 2
    with pytest.raises(
        ConfigError, match=r"holds the split 'train.* alone, not 'test'; name the folder of 'test', or write"
    ):
        dataset(path=str(tmp_path / "saved"), column="question", split="test")


def test_a_folder_of_rows_without_the_name_of_a_split_is_any(tmp_path, monkeypatch):
    save(tmp_path / "saved", ROWS, monkeypatch)
    assert len(dataset(path=str(tmp_path / "saved"), column="question", split="test")) == 2


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"split": "dev"}, "has no split 'dev'; it has: test, train"),
        ({"revision": "main"}, "config and revision are of the hub's"),
        ({"path": "org/name"}, r"is no local folder.*revision=None is no commit; .*set revision to the 40"),
        ({"path": "org/name", "revision": "main"}, r"revision='main' is no commit"),
    ],
)
def test_what_cannot_be_opened_says_the_way_out(tmp_path, monkeypatch, params, why):
    save(tmp_path / "saved", [], monkeypatch, test=ROWS, train=ROWS)
    with pytest.raises(ConfigError, match=why):
        dataset(**({"path": str(tmp_path / "saved"), "column": "question"} | params))


@pytest.mark.parametrize("kind", ["script", "generation", "missing"])
def test_a_data_set_of_the_hub_that_does_not_load_is_a_mistake_of_the_run_file(monkeypatch, kind):
    base = type("DatasetsError", (Exception,), {})
    errors = {
        "script": RuntimeError("Dataset scripts are no longer supported, but found name.py"),
        "generation": type("DatasetGenerationError", (base,), {})("An error occurred while generating the dataset"),
        "missing": FileNotFoundError("Dataset 'org/name' doesn't exist on the Hub"),
    }

    def load_dataset(*_, **__):
        raise errors[kind]

    exceptions = SimpleNamespace(DatasetsError=base)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset, exceptions=exceptions))
    with pytest.raises(ConfigError, match=r"path='org/name' does not load: .*Error: .*[dD]ataset"):
        dataset(path="org/name", revision="0" * 40)


def test_a_data_set_of_the_hub_is_read_once(monkeypatch):
    asked = []

    class Found:
        def with_format(self, _):
            return pa.table({"question": ["1 + 1 =", "2 + 2 ="]})

    def load_dataset(path, config, *, split, revision):
        asked.append((path, config, split, revision))
        return Found()

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    opened = [dataset(path="org/once", revision="0" * 40, column="question") for _ in range(3)]
    assert opened[0] is opened[2] and opened[0][1].text == "2 + 2 ="
    assert dataset(path="org/once", revision="1" * 40, column="question") is not opened[0]
    assert asked == [("org/once", None, "train", "0" * 40), ("org/once", None, "train", "1" * 40)]


def test_without_the_package_the_error_is_a_line_of_pip(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'treadwheel\[datasets\]'"):
        dataset(path=str(tmp_path))

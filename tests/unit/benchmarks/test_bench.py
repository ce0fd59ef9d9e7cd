import json
from pathlib import Path

import pytest

from tests.benchmarks import __main__ as bench


def row(**given):
    return dict.fromkeys(bench.COLUMNS) | given


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        ({"value": 100.0, "ratio": 0.9, "aim": ">= 0.85"}, True),
        ({"value": 100.0, "ratio": 0.8, "aim": ">= 0.85"}, False),
        ({"value": 24.0, "aim": "< 25"}, True),
        ({"value": 24.0}, None),
        ({"value": "needs a GPU", "aim": "> 1"}, None),
    ],
)
def test_an_aim_is_of_the_ratio_where_there_is_one_else_of_the_value(given, verdict):
    assert bench.meets_aim(row(**given)) is verdict


def test_one_benchmark_replaces_its_own_rows_only(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "OUT", tmp_path / "build" / "bench.json")
    bench.write([row(name="a", value=1), row(name="b", value=1)], keep_others=False)
    bench.write([row(name="b", value=2)], keep_others=True)
    assert {each["name"]: each["value"] for each in json.loads(bench.OUT.read_text())} == {"a": 1, "b": 2}


def test_every_file_of_the_folder_is_a_benchmark_that_imports():
    found = dict(bench.benchmarks(None))
    assert found.keys() == {path.stem for path in Path(bench.__file__).parent.glob("[a-z]*.py")}
    assert all(map(callable, found.values()))

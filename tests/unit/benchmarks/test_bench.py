import os

import pytest

from tests.benchmarks import __main__ as bench
from tests.benchmarks import _record, gpu, sandbox


def row(**given):
    return dict.fromkeys(_record.COLUMNS) | given


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        ({"value": 100.0, "ratio": 0.9, "aim": ">= 0.85"}, True),
        ({"value": 100.0, "ratio": 0.8, "aim": ">= 0.85"}, False),
        ({"value": 14.0, "aim": "<= 15 s"}, True),
        ({"value": 90.0, "ratio": 0.9, "aim": "0.67 to 1.33"}, True),
        ({"value": 60.0, "ratio": 0.6, "aim": "0.67 to 1.33"}, False),
        ({"value": 140.0, "ratio": 1.4, "aim": "0.67 to 1.33"}, False),
        ({"value": 24.0}, None),
        ({"value": "needs a GPU", "aim": "> 1"}, None),
    ],
)
def test_an_aim_is_of_the_ratio_where_there_is_one_else_of_the_value(given, verdict):
    assert _record.meets_aim(row(**given)) is verdict


def test_rows_that_are_measured_one_after_the_other_have_a_load_each(monkeypatch):
    clock, loads = [0.0], iter([(1.0, 0, 0), (2.0, 0, 0), (3.0, 0, 0), (4.0, 0, 0)])
    monkeypatch.setattr(_record.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(os, "getloadavg", lambda: next(loads))

    def run():
        clock[0] += 60.0
        yield {"name": "first", "value": 1.0}
        yield {"name": "with the first", "value": 1.0}
        clock[0] += 60.0
        yield {"name": "second", "value": 1.0}

    assert [each["load"] for each in _record.measured("peers", run)] == [1.0, 1.0, 3.0]


def test_a_row_says_where_and_when_it_was_measured_and_whether_its_aim_is_met():
    (found,) = _record.measured("peers", lambda: [{"name": "a", "value": 2.0, "unit": "s", "aim": "<= 1 s"}])
    assert found["benchmark"] == "peers" and found["met"] is False
    assert "cores" in found["machine"] and "torch" in found["machine"]
    assert found["date"].count("-") == 2


def test_a_benchmark_replaces_its_own_rows_only_and_rows_of_benchmarks_that_are_gone_go(tmp_path):
    file = tmp_path / "build" / "bench.json"
    before = [{"benchmark": "sampling", "name": "a"}, {"benchmark": "peers", "name": "b"}]
    _record.write(file, before)
    file.write_text(file.read_text().replace("sampling", "gone"))
    _record.write(file, [{"benchmark": "losses", "name": "c"}])
    _record.write(file, [{"benchmark": "peers", "name": "d"}])
    assert [(each["benchmark"], each["name"]) for each in _record.read(file)] == [("losses", "c"), ("peers", "d")]


def test_only_may_name_several(monkeypatch, tmp_path):
    """`make bench ONLY="gpu sandbox"`."""
    monkeypatch.setattr(_record, "NEWEST", tmp_path / "bench.json")
    for module in (gpu, sandbox):
        monkeypatch.setattr(module, "rows", lambda: [{"name": "a", "value": 1.0, "unit": "s"}])
    monkeypatch.setattr("sys.argv", ["bench", "--only", "gpu", "--only", "sandbox"])
    assert bench.main() == 0
    assert [each["benchmark"] for each in _record.read(_record.NEWEST)] == ["gpu", "sandbox"]


def test_rows_before_a_failure_are_kept(monkeypatch, tmp_path):
    def rows():
        yield {"name": "a", "value": 1.0, "unit": "s"}
        raise OSError("the peer is gone")

    monkeypatch.setattr(_record, "NEWEST", tmp_path / "bench.json")
    monkeypatch.setattr(sandbox, "rows", rows)
    monkeypatch.setattr("sys.argv", ["bench", "--only", "sandbox"])
    with pytest.raises(OSError, match="the peer is gone"):
        bench.main()
    assert [each["name"] for each in _record.read(_record.NEWEST)] == ["a"]


def test_each_name_must_be_one_of_the_folder(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench", "--only", "nothing", "--only", "gpu"])
    assert bench.main() == 2
    assert "no benchmark is called 'nothing'; there are: asynchrony, " in capsys.readouterr().err


def test_every_file_of_the_folder_is_a_benchmark_that_imports():
    found = dict(bench.benchmarks(_record.NAMES))
    assert found.keys() == {path.stem for path in _record.FOLDER.glob("[a-z]*.py")}
    assert all(map(callable, found.values()))

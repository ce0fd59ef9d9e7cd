import pytest
import torch

from tests.benchmarks import __main__ as bench
from tests.benchmarks import _record, gpu


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA GH200 480GB", 989.4),
    ],
)
def test_a_gpu_is_known_by_a_part_of_its_name(name, tflops):
    assert gpu.peak_of(name) == tflops * 1e12


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090", "NVIDIA A10G", "NVIDIA H100 80GB HBM3 MIG 3g.40gb"])
def test_a_gpu_that_is_not_known_has_no_peak_and_its_row_no_ratio(name):
    assert gpu.peak_of(name) is None
    row = gpu._learning("shared", {"device": name, "num_parameters": 10, "shared": 5.0})
    assert row["value"] == 5.0 and "ratio" not in row and "aim" not in row
    assert row["baseline"] == f"the peak of {name} is not known here"


def test_a_share_of_the_peak_is_six_flop_a_parameter_and_token():
    """At 494 million parameters and 156,000 tokens/s: 6 * 494e6 * 156e3 = 462 of 989.4 TFLOP/s."""
    found = {"device": "NVIDIA H100 80GB HBM3", "num_parameters": 494_000_000, "shared": 100e3, "compiled": 156e3}
    row = gpu._learning("compiled", found)
    assert row["ratio"] == pytest.approx(0.467, abs=1e-3) == row["value"] / row["baseline_value"]
    assert row["aim"] == ">= 0.45" and gpu._learning("shared", found)["aim"] is None


def test_an_estimate_of_memory_may_be_too_large_by_no_more_than_too_small():
    rows = [gpu._memory({"peak_bytes": peak, "estimated_bytes": 100}) for peak in (60, 70, 130, 140)]
    assert [_record.meets_aim(dict.fromkeys(_record.COLUMNS) | row) for row in rows] == [False, True, True, False]


def test_tokens_of_a_shared_prompt_count_once():
    assert gpu._num_computed("shared") == 16 * 32 + 128 * 511
    assert gpu._num_computed("packed") == 128 * (32 + 511)


def test_without_a_gpu_there_are_no_rows_and_a_message(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert list(gpu.rows()) == []
    assert capsys.readouterr().err == f"{gpu.WITHOUT}\n"


def test_a_benchmark_that_measured_nothing_is_not_taken_for_one_that_met_its_aims(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench._record, "NEWEST", tmp_path / "bench.json")
    monkeypatch.setattr("sys.argv", ["bench", "--only", "gpu"])
    assert bench.main() == 1

"""The harness itself: it lets agreement pass, and nothing else."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.golden import through_objective
from tests.golden.cases import Uncompared, run_case
from tests.golden.through_objective import Step

STRICT = {"rtol": 0.0, "atol": 1e-6}


def outcome(tmp_path, adapter, *, out, config=None, tolerance=STRICT, x=(1.0, 2.0), function="peer.module.twice"):
    """Of a case with one variant `v` whose input is x, seen through an adapter of that function."""
    folder = tmp_path / "peer" / "case"
    folder.mkdir(parents=True)
    variant = {"function": function, "config": config or {}, "outputs": {name: {} for name in out}}
    case = {"peer": "peer", "case": "case", "inputs": {"x": {}}, "tolerance": tolerance, "variants": {"v": variant}}
    (folder / "case.json").write_text(json.dumps(case))
    recorded = {f"out.v.{name}": torch.tensor(value) for name, value in out.items()}
    save_file({"in.x": torch.tensor(x)} | recorded, folder / "data.safetensors")
    return run_case(folder, adapters={"peer": {"twice": adapter}})


def twice(v):
    return {"y": 2 * v["x"]}


def test_outputs_that_agree_pass(tmp_path):
    assert outcome(tmp_path, twice, out={"y": [2.0, 4.0]}).passed == ["v"]


def test_outputs_that_do_not_agree_differ(tmp_path):
    assert "max error 1 (4 instead of 5)" in outcome(tmp_path, twice, out={"y": [2.0, 5.0]}).differs["v"]


def test_a_setting_that_was_not_read_may_have_changed_the_result(tmp_path):
    found = outcome(tmp_path, twice, out={"y": [2.0, 4.0]}, config={"factor": 3})
    assert found.unsupported == {"v": "parameter factor"} and not found.passed


def test_a_setting_inside_a_section_has_to_be_read_too(tmp_path):
    def reads_the_section(v):
        return twice(v) | {"seen": v.option("section").get("one")}

    found = outcome(tmp_path, reads_the_section, out={"y": [2.0, 4.0]}, config={"section": {"one": 1, "two": 2}})
    assert found.unsupported == {"v": "parameter section.two"}


def test_a_keyword_in_the_functions_text_is_a_setting(tmp_path):
    found = outcome(tmp_path, twice, out={"y": [2.0, 4.0]}, function="twice(mask=None)")
    assert found.unsupported == {"v": "parameter mask"}


def test_a_function_of_another_name_has_no_counterpart(tmp_path):
    found = outcome(tmp_path, twice, out={"y": [2.0, 4.0]}, function="peer.module.twice_over")
    assert found.unsupported == {"v": "no counterpart of peer.module.twice_over"}


def test_an_output_that_nobody_compares_does_not_pass(tmp_path):
    found = outcome(tmp_path, twice, out={"y": [2.0, 4.0], "z": [1.0]})
    assert found.unsupported == {"v": "no counterpart of its outputs z"} and not found.passed


def test_an_output_is_left_out_with_a_reason(tmp_path):
    found = outcome(tmp_path, lambda v: twice(v) | {"z": Uncompared("a log line")}, out={"y": [2.0, 4.0], "z": [1.0]})
    assert found.passed == ["v"] and "not compared: z: a log line" in found.line()


def normalised(v):
    """Two groups of two, divided by their spread."""
    groups = v["x"].view(2, 2)
    return {"y": ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-9)).flatten()}


ILL = {"rtol": 0.05, "atol": 0.05, "ill_conditioned": "one group has no variance"}


@pytest.mark.parametrize(("second", "passes"), [(0.7071, True), (0.5, False)])
def test_rounding_noise_is_forgiven_where_it_is_noise_and_nowhere_else(tmp_path, second, passes):
    """The group of 0.7s has no variance: what is recorded there, 0.9, is noise. The other group's entries are not."""
    noise_and_values = {"y": [0.9, -0.9, -second, second]}
    found = outcome(tmp_path, normalised, out=noise_and_values, tolerance=ILL, x=(0.7, 0.7, 0.0, 1.0))
    assert bool(found.passed) is passes


def test_a_loss_goes_through_the_objective_of_a_run(monkeypatch):
    called = []
    monkeypatch.setattr(through_objective.Objective, "loss", lambda *_, **__: called.append("loss") or 1 / 0)
    ones = torch.ones(1, 2)
    step = Step(policy_BT=-ones, old_BT=-ones, advantages_BT=ones, mask=ones.bool())
    with pytest.raises(ZeroDivisionError):
        step.loss({"policy_loss": {"name": "ppo_clip"}, "aggregation": {"name": "token_mean"}})
    assert called == ["loss"]

"""On-policy distillation in a real cluster: two teachers by source, tokens that they find likeliest, and completions of a given form."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.faults import Run, write_run
from tests.models import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]
TOP_K = 3


class Distilled(NamedTuple):
    run: Run
    models: dict[str, Path]
    """The student, the teacher of math, and that of all else."""

    def rows(self, step: int) -> list[dict[str, Any]]:
        return self.run.trajectories()[step].to_pylist()

    def own_logprobs(self, name: str, row: dict[str, Any]) -> Tensor:
        """Of all tokens at each token of a completion, under one of the models as it was saved, [T, V]."""
        ids = torch.tensor(row["prompt_token_ids"] + row["completion_token_ids"])
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(self.models[name])(input_ids=ids[None]).logits[0]
        return logits[len(row["prompt_token_ids"]) - 1 : -1].log_softmax(-1)


@pytest.fixture(scope="module")
def distilled(tmp_path_factory) -> Distilled:
    folder = tmp_path_factory.mktemp("distillation")
    models = {name: make_tiny_model(folder / name, seed=i) for i, name in enumerate(("student", "math", "other"))}
    prompts = [{"prompt": f"{i}+{i}=", "source": ("math", "code")[i % 2]} for i in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    file = write_run(
        folder,
        models["student"],
        num_steps=2,
        prompts={"name": "file", "path": str(folder / "rows.jsonl")},
        reward={"judge": "none"},
        sampling={"max_tokens": 8, "regex": "[0-9]{2}x"},
        buffer={"groups_per_step": 4, "trajectories_per_group": 2},
        reference={"num_threads": 1, "path": str(models["other"]), "by_source": {"math": str(models["math"])}},
        algorithm={"preset": "on_policy_distillation", "distillation": {"top_k": TOP_K}},
    )
    return Distilled(Run(folder / "run").to_end(file), models)


def _selected(logprobs_TV: Tensor, row: dict[str, Any]) -> Tensor:
    return logprobs_TV.gather(1, torch.tensor(row["completion_token_ids"])[:, None])[:, 0]


def test_every_token_is_scored_by_the_teacher_of_its_source(distilled):
    rows = distilled.rows(1) + distilled.rows(2)
    assert {json.loads(row["info"])["source"] for row in rows} == {"math", "code"}
    for row in rows:
        is_math = json.loads(row["info"])["source"] == "math"
        right, wrong = ("math", "other") if is_math else ("other", "math")
        taught_TV, found_T = distilled.own_logprobs(right, row), torch.tensor(row["reference_logprobs"])
        assert_close(found_T, _selected(taught_TV, row), rtol=0, atol=1e-4)
        assert (found_T - _selected(distilled.own_logprobs(wrong, row), row)).abs().max() > 0.05
        top = taught_TV.topk(TOP_K)
        assert torch.tensor(row["reference_top_ids"]).view(-1, TOP_K).equal(top.indices.int())
        found_TP = torch.tensor(row["reference_top_logprobs"]).view(-1, TOP_K + 1)
        rest_T1 = 1 - top.values.exp().sum(1, keepdim=True)
        assert_close(found_TP.exp(), torch.cat([top.values.exp(), rest_T1], 1), rtol=0, atol=1e-5)


def test_the_learner_measures_the_kl_to_the_teachers(distilled):
    """In the first step the student is the model as it was saved: the KL can be computed beside the run."""
    kls: list[Tensor] = []
    for row in distilled.rows(1):
        own_TV = distilled.own_logprobs("student", row)
        ids_TK = torch.tensor(row["reference_top_ids"]).view(-1, TOP_K).long()
        own_TP = torch.cat([own_TV.gather(1, ids_TK).exp(), own_TV.exp().scatter(1, ids_TK, 0).sum(1, keepdim=True)], 1)
        taught_TP = torch.tensor(row["reference_top_logprobs"]).view(-1, TOP_K + 1)
        kls.append((own_TP * (own_TP.log() - taught_TP)).sum(1))
    expected = float(torch.cat(kls).mean())
    assert distilled.run.metrics()[1]["learner/distillation_kl_mean"] == pytest.approx(expected, rel=1e-3)


def test_all_completions_have_the_form_and_the_mismatch_is_what_the_mask_took_away(distilled):
    """μ is π over the tokens that the form allows; the learner's π is over all, and the mismatch is log π − log μ."""
    digits = AutoTokenizer.from_pretrained(distilled.models["student"]).convert_tokens_to_ids(list("0123456789"))
    gaps: list[Tensor] = []
    for row in distilled.rows(1):
        assert re.fullmatch("[0-9]{2}x", row["completion_text"])
        own_TV, rollout_T = distilled.own_logprobs("student", row), torch.tensor(row["rollout_logprobs"])
        among_digits_T = _selected(own_TV, row)[:2] - own_TV[:2, digits].logsumexp(1)
        assert_close(rollout_T[:2], among_digits_T, rtol=0, atol=1e-4)
        assert_close(rollout_T[2:], torch.zeros(len(rollout_T) - 2), rtol=0, atol=1e-6)
        gaps.append((_selected(own_TV, row) - rollout_T).abs())
    assert all(re.fullmatch("[0-9]{2}x", row["completion_text"]) for row in distilled.rows(2))
    mismatch = distilled.run.metrics()[1]["mismatch/mean_abs_nats"]
    assert mismatch > 1 and mismatch == pytest.approx(float(torch.cat(gaps).mean()), rel=1e-3)
    assert [event["settings"] for event in distilled.run.events("biased_sampling")] == [["regex"]]


def test_the_record_verifies(distilled):
    assert distilled.run.problems() == ()


@pytest.mark.exhaustive
def test_the_record_replays_to_the_same_weights(distilled):
    assert distilled.run.replay().endswith(": equal\n")

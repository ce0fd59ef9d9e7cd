"""On-policy distillation through a learner: a teacher scores the student's own tokens.

Their reverse KL is the whole advantage; or the KL over the teacher's likeliest tokens is a term of the loss. V is the vocabulary's size.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, tensor
from torch.testing import assert_close

from cluster.contracts.algorithm_config import AlgorithmConfig
from cluster.contracts.config import ModelConfig, ReferenceConfig
from cluster.contracts.errors import ConfigError, DataError
from cluster.contracts.schema import with_columns
from learner.algorithms.objective import Objective
from learner.algorithms.registry.presets import expand
from learner.learner import Learner
from learner.model.head import Head, selected_logprobs, top_tokens
from learner.model.reference import ReferenceModel
from tests.models import make_tiny_model
from tests.unit.learner.algorithms.batches import case
from tests.unit.learner.trajectories import VOCABULARY, make_config, make_group, with_partition

pytestmark = pytest.mark.slow

PRESET = expand({"preset": "on_policy_distillation"})
TOP_K = expand({"preset": "on_policy_distillation_top_k"})


def test_a_tokens_gradient_is_its_own_log_ratio_to_the_teacher():
    whole = case(3, num_groups=1, group_size=1, width=3)
    student = tensor([[-1.0, -2.0, -5.0]], dtype=torch.float64)
    batch = dataclasses.replace(
        whole.batch,
        loss_mask_NT=tensor([[True, True, False]]),
        rollout_logprobs_NT=student,
        reference_logprobs_NT=tensor([[-3.0, -1.5, 0.0]], dtype=torch.float64),
        proximal_logprobs_NT=None,
    )
    objective = Objective.from_config(AlgorithmConfig.model_validate(PRESET))
    policy = student.clone().requires_grad_()
    prepared = objective.prepare(batch)
    assert prepared.advantages_NT.tolist() == [[-2.0, 0.5, 0.0]]
    objective.loss(prepared, policy_logprobs_BT=policy).loss.backward()
    assert policy.grad is not None and policy.grad.tolist() == [[1.0, -0.25, 0.0]]


@pytest.mark.parametrize(("algorithm", "num_steps"), [(PRESET, 30), (TOP_K, 10)])
def test_the_exact_reverse_kl_to_the_teacher_falls(tmp_path, algorithm: dict[str, Any], num_steps: int):
    learner, teacher = _pair(tmp_path, algorithm=algorithm)
    prompts = torch.arange(10, 26).reshape(4, 4)
    sampling = torch.Generator().manual_seed(0)
    every = [[v] for v in range(VOCABULARY)]
    taught_PV = tensor([teacher.score([p] * VOCABULARY, every)["reference_logprobs"] for p in prompts.tolist()])
    taught_PV = taught_PV.squeeze(-1)
    kls: list[float] = []
    for _ in range(num_steps):
        own_PV = _next_token(learner, prompts)
        kls.append(float((own_PV.exp() * (own_PV - taught_PV)).sum(1).mean()))
        learner.update(*(_sampled(p, prompts, own_PV, teacher, learner.version, sampling) for p in range(4)))
    assert kls[0] > 1.0 and kls[-1] < 0.5 * kls[0], kls


def _pair(folder: Path, *, algorithm: dict[str, Any], **sections: Any) -> tuple[Learner, ReferenceModel]:
    """A student and its teacher."""
    paths = [make_tiny_model(folder / str(seed), seed=seed) for seed in (0, 1)]
    sections |= {"reference": {"path": str(paths[1])}, "optimizer": {"learning_rate": 3e-3}}
    config = make_config(paths[0], algorithm=algorithm, **sections)
    distillation = config.algorithm.distillation
    teacher = ReferenceModel(
        ModelConfig(path=str(paths[1]), dtype="float32"),
        reference=ReferenceConfig(),
        learner=config.learner,
        sampling=config.sampling,
        top_k=distillation and distillation.top_k,
    )
    return Learner(config), teacher


@torch.no_grad()
def _next_token(learner: Learner, prompts: Tensor) -> Tensor:
    return torch.stack([learner.policy.own_logits(prompt)[-1].float().log_softmax(-1) for prompt in prompts])


def _sampled(
    place: int, prompts: Tensor, own_PV: Tensor, teacher: ReferenceModel, version: int, sampling: torch.Generator
):
    """A group of 32 completions of one token, as a run would bring it: rewards of no use, and what both models say."""
    tokens = torch.multinomial(own_PV[place].exp(), 32, replacement=True, generator=sampling).tolist()
    group = make_group(place, rewards=[0.0] * 32, max_length=1, version=version)
    texts = [prompts[place].tolist()] * 32, [[token] for token in tokens]
    return with_columns(
        group,
        prompt_token_ids=texts[0],
        completion_token_ids=texts[1],
        rollout_logprobs=[[float(own_PV[place, token])] for token in tokens],
        **teacher.score(*texts),
    )


def test_the_kl_is_over_the_teachers_likeliest_tokens_and_all_others_as_one():
    """Teacher 8, 5, 2, 1 and student 2, 2, 8, 4 in 16: with two tokens (1/2, 5/16, 3/16) and (1/8, 1/8, 3/4)."""
    student, teacher = tensor([2, 2, 8, 4]) / 16, tensor([8, 5, 2, 1]) / 16
    by_hand = {
        "reverse": math.log(1 / 4) / 8 + math.log(2 / 5) / 8 + 3 / 4 * math.log(4),
        "forward": math.log(4) / 2 + 5 / 16 * math.log(5 / 2) + 3 / 16 * math.log(1 / 4),
    }
    for direction, expected in by_hand.items():
        loss, report, _ = _distilled(student.log(), teacher.log(), top_k=2, direction=direction, coefficient=3.0)
        assert loss == pytest.approx(3 * expected)
        assert report["distillation_kl_mean"] == pytest.approx(expected)
        assert (report["rest_mean"], report["rest_reference_mean"]) == pytest.approx((3 / 4, 3 / 16))


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_over_all_tokens_value_and_gradient_are_those_of_the_kl_of_the_whole_softmax(
    direction: str, temperature: float
):
    generator = torch.Generator().manual_seed(3)
    student_V, teacher_V = (3 * torch.randn(9, generator=generator, dtype=torch.float64) for _ in range(2))
    found = _distilled(student_V, teacher_V, top_k=9, direction=direction, temperature=temperature)
    student_V.requires_grad_()
    p_V, q_V = ((logits / temperature).log_softmax(0) for logits in (student_V, teacher_V))
    from_V, to_V = (p_V, q_V) if direction == "reverse" else (q_V, p_V)
    expected = (from_V.exp() * (from_V - to_V)).sum()
    expected.backward()
    assert_close(found[0], float(expected.detach()))
    assert_close(found[2], student_V.grad)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_fewer_tokens_never_give_more_kl_and_none_between_equals(direction: str):
    generator = torch.Generator().manual_seed(4)
    student_V, teacher_V = (4 * torch.randn(12, generator=generator) for _ in range(2))
    kls = [_distilled(student_V, teacher_V, top_k=k, direction=direction)[0] for k in range(1, 13)]
    assert kls[0] >= 0 and kls == pytest.approx(sorted(kls), abs=1e-6)
    equal = _distilled(teacher_V, teacher_V, top_k=3, direction=direction)
    assert equal[0] == 0 and equal[2].abs().max() < 1e-7


def _distilled(
    student_V: Tensor,
    teacher_V: Tensor,
    *,
    top_k: int,
    direction: str,
    coefficient: float = 1.0,
    temperature: float = 1.0,
) -> tuple[float, dict[str, float], Tensor]:
    """Of one token that the student drew: loss, report, and the gradient of the student's logits."""
    algorithm = {"distillation": {"coefficient": coefficient, "top_k": top_k, "direction": direction}}
    objective = Objective.from_config(AlgorithmConfig.model_validate({"advantage": "none"} | algorithm))
    head, own = Head(temperature=temperature), torch.eye(len(student_V), dtype=student_V.dtype)
    student_CV, drawn_C = student_V.detach()[None].clone().requires_grad_(), tensor([0])
    ids_CK = top_tokens(teacher_V[None], own, num_tokens=top_k, head=head)
    *_, taught_CP = selected_logprobs(teacher_V[None], own, drawn_C, head=head, candidates_CK=ids_CK)
    logprobs_C, _, partition_CP = selected_logprobs(student_CV, own, drawn_C, head=head, candidates_CK=ids_CK)
    assert taught_CP is not None and partition_CP is not None
    own_BT, partition_BTP, taught_BTP = (_with_garbage(x) for x in (logprobs_C, partition_CP, taught_CP))
    batch = dataclasses.replace(
        case(3, num_groups=1, group_size=1, width=2).batch,
        loss_mask_NT=tensor([[True, False]]),
        rollout_logprobs_NT=own_BT.detach(),
        reference_logprobs_NT=own_BT.detach(),
        reference_partition_NTP=taught_BTP,
    )
    result = objective.loss(objective.prepare(batch), policy_logprobs_BT=own_BT, policy_partition_BTP=partition_BTP)
    result.loss.backward()
    assert student_CV.grad is not None
    return float(result.loss.detach()), result.statistics.compute(), student_CV.grad[0]


def _with_garbage(values_C: Tensor) -> Tensor:
    """One token as a trajectory of two, of which the second is masked."""
    return torch.cat([values_C, torch.full_like(values_C, math.nan)])[None]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_run_computes_the_kl_of_both_models_own_softmax(tmp_path, temperature: float):
    algorithm = {"advantage": "none", "distillation": {"top_k": VOCABULARY}}
    learner, teacher = _pair(tmp_path, algorithm=algorithm, sampling={"temperature": temperature})
    group = make_group(0, lengths=(3, 1, 4))
    texts = [group[name].to_pylist() for name in ("prompt_token_ids", "completion_token_ids")]
    kls: list[Tensor] = []
    for prompt, completion in zip(*texts, strict=True):
        logits = [m.own_logits(tensor(prompt + completion)).detach() for m in (learner.policy, teacher._policy)]
        own_TV, taught_TV = ((x[len(prompt) - 1 : -1] / temperature).log_softmax(-1) for x in logits)
        kls.append((own_TV.exp() * (own_TV - taught_TV)).sum(1))
    metrics = learner.update(with_columns(group, **teacher.score(*texts))).metrics
    assert metrics["learner/distillation_kl_mean"] == pytest.approx(float(torch.cat(kls).mean()), rel=1e-4)
    assert (
        metrics["learner/loss"]
        == metrics["learner/distillation_loss"]
        == pytest.approx(float(torch.cat(kls).mean()), rel=1e-4)
    )


def test_micro_batches_and_layouts_change_nothing_of_it(tmp_path):
    path, found = make_tiny_model(tmp_path), []
    for max_tokens, packing in ((16384, "auto"), (30, "auto"), (30, "padded")):
        options = {"max_tokens_per_micro_batch": max_tokens, "packing": packing}
        learner = Learner(make_config(path, algorithm={"distillation": {"top_k": 2}}, learner=options))
        found.append(learner.update(*(with_partition(make_group(i)) for i in range(3))).metrics)
    for other in found[1:]:
        for name in ("learner/loss", "learner/distillation_kl_mean", "learner/rest_mean", "learner/gradient_norm"):
            assert other[name] == pytest.approx(found[0][name], rel=1e-4)


def test_a_group_of_episodes_that_all_failed_before_their_first_token_gets_empty_columns(tmp_path):
    _, teacher = _pair(tmp_path, algorithm=TOP_K)
    assert teacher.score([], []) == {"reference_logprobs": [], "reference_top_ids": [], "reference_top_logprobs": []}


def test_a_batch_without_the_teachers_tokens_is_refused(tmp_path):
    learner = Learner(make_config(make_tiny_model(tmp_path), algorithm={"distillation": {"top_k": 2}}))
    group = with_partition(make_group(0, lengths=(1, 2, 3)))
    with pytest.raises(DataError, match="has no reference_partition"):
        learner.update(with_columns(group, reference_top_ids=[None] * 3, reference_top_logprobs=[None] * 3))
    with pytest.raises(DataError, match="'reference_top_ids': token 128 is outside the learner's vocabulary"):
        learner.update(with_columns(group, reference_top_ids=[[128, 1], [2] * 4, [3] * 6]))
    other = with_columns(
        group,
        group_id=["1"] * 3,
        reference_top_ids=[[1], [2] * 2, [3] * 3],
        reference_top_logprobs=[[-1.0] * 2, [-1.0] * 4, [-1.0] * 6],
    )
    with pytest.raises(DataError, match=r"'reference_top_logprobs': trajectories of one step have \[2, 3\] per token"):
        learner.update(group, other)


@pytest.mark.parametrize("truncation", [{"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_truncated_sampling_is_refused(tmp_path, truncation: dict[str, float]):
    with pytest.raises(ValidationError, match=r"sampling\.\w+=.* with algorithm\.distillation.*leave sampling"):
        make_config(tmp_path, algorithm={"distillation": {}}, sampling=truncation)


def test_without_a_teacher_the_preset_is_refused(tmp_path):
    for algorithm in (PRESET, TOP_K):
        with pytest.raises(
            ValidationError, match=r"advantage='none' learns from the reference.*name a teacher in reference\.path"
        ):
            make_config(tmp_path, algorithm=algorithm)
    with pytest.raises(ConfigError, match="advantage='none' and nothing else to learn from"):
        Objective.from_config(AlgorithmConfig.model_validate({"advantage": "none"}))


@pytest.mark.parametrize(
    "own",
    [
        {"kl": {"reward": {"credit": "trajectory"}}},
        {"reward_shaping": [{"name": "reward_clip", "low": 0.0, "high": 1.0}]},
    ],
)
def test_what_changes_a_reward_that_nothing_reads_is_refused(own):
    with pytest.raises(ConfigError, match="advantage='none' reads none"):
        Objective.from_config(AlgorithmConfig.model_validate(expand({"preset": "on_policy_distillation", **own})))


def test_a_group_of_one_learns_from_a_teacher():
    Objective.from_config(AlgorithmConfig.model_validate(PRESET)).check_group_size(1, num_candidates=1)

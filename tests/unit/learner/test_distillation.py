"""On-policy distillation through a learner: a teacher scores the student's own tokens, and their reverse KL is the whole advantage."""

import dataclasses

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, tensor

from cluster.contracts.algorithm_config import AlgorithmConfig
from cluster.contracts.config import ModelConfig, ReferenceConfig
from cluster.contracts.errors import ConfigError
from cluster.contracts.schema import with_columns
from learner.algorithms.objective import Objective
from learner.algorithms.registry.presets import expand
from learner.learner import Learner
from learner.model.reference import ReferenceModel
from tests.models import make_tiny_model
from tests.unit.learner.algorithms.batches import case
from tests.unit.learner.trajectories import VOCABULARY, make_config, make_group

PRESET = expand({"preset": "on_policy_distillation"})


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


def test_the_exact_reverse_kl_to_the_teacher_falls(tmp_path):
    paths = [make_tiny_model(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    config = make_config(
        paths[0], algorithm=PRESET, reference={"path": str(paths[1])}, optimizer={"learning_rate": 3e-3}, num_steps=30
    )
    learner = Learner(config)
    teacher = ReferenceModel(
        ModelConfig(path=str(paths[1]), dtype="float32"),
        reference=ReferenceConfig(),
        learner=config.learner,
        sampling=config.sampling,
    )
    prompts = torch.arange(10, 26).reshape(4, 4)
    sampling = torch.Generator().manual_seed(0)
    taught_PV = tensor([teacher.logprobs([p] * VOCABULARY, [[v] for v in range(VOCABULARY)]) for p in prompts.tolist()])
    taught_PV = taught_PV.squeeze(-1)
    kls: list[float] = []
    for _ in range(30):
        own_PV = _next_token(learner, prompts)
        kls.append(float((own_PV.exp() * (own_PV - taught_PV)).sum(1).mean()))
        learner.update(*(_sampled(p, prompts, own_PV, taught_PV, learner.version, sampling) for p in range(4)))
    assert kls[0] > 1.0 and kls[-1] < 0.5 * kls[0], kls


@torch.no_grad()
def _next_token(learner: Learner, prompts: Tensor) -> Tensor:
    return torch.stack([learner.policy.own_logits(prompt)[-1].float().log_softmax(-1) for prompt in prompts])


def _sampled(place: int, prompts: Tensor, own_PV: Tensor, taught_PV: Tensor, version: int, sampling: torch.Generator):
    """A group of 32 completions of one token, as a run would bring it: rewards of no use, log-probs of both models."""
    tokens = torch.multinomial(own_PV[place].exp(), 32, replacement=True, generator=sampling).tolist()
    group = make_group(place, rewards=[0.0] * 32, max_length=1, version=version)
    return with_columns(
        group,
        prompt_token_ids=[prompts[place].tolist()] * 32,
        completion_token_ids=[[token] for token in tokens],
        rollout_logprobs=[[float(own_PV[place, token])] for token in tokens],
        reference_logprobs=[[float(taught_PV[place, token])] for token in tokens],
    )


def test_without_a_teacher_the_preset_is_refused(tmp_path):
    with pytest.raises(
        ValidationError, match=r"advantage='none' learns from the reference.*name a teacher in reference\.path"
    ):
        make_config(tmp_path, algorithm=PRESET)
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

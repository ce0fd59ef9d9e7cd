"""Trajectories that no policy of a run sampled: what the learner takes in place of the log-probs that no one knows."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from cluster.contracts.errors import ConfigError
from learner.algorithms.objective import Objective
from learner.learner import Learner
from learner.model.reference import ReferenceModel
from tests.unit.learner.trajectories import make_config, make_group

RECOMPUTE = {"policy_loss": "ppo_clip", "proximal": "recompute"}


def likely(rollout_logprobs_NT: Tensor) -> Tensor:
    return rollout_logprobs_NT > -1


def imported(index: int = 0):
    return make_group(index, rollout_logprobs=[None, None, None])


@pytest.mark.parametrize("algorithm", [RECOMPUTE, {"policy_loss": "reinforce"}])
def test_the_policy_at_the_start_of_the_step_stands_for_the_one_that_sampled(model_path, algorithm):
    config = make_config(model_path, algorithm=algorithm)
    reference = ReferenceModel(
        config.model, reference=config.reference, learner=config.learner, sampling=config.sampling
    )
    group = imported()
    tokens = (group[name].to_pylist() for name in ("prompt_token_ids", "completion_token_ids"))
    own = make_group(0, rollout_logprobs=reference.score(*tokens)["reference_logprobs"])
    weights = []
    for each in (group, own):
        learner = Learner(config)
        metrics = learner.update(each).metrics
        assert metrics["learner/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        weights.append(dict(learner.policy.named_parameters()))
    for name, tensor in weights[0].items():
        assert_close(tensor, weights[1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "named"),
    [
        ({"policy_loss": "ppo_clip"}, "algorithm.proximal='rollout'"),
        ({"policy_loss": "ppo_clip", "proximal": "approximate"}, "algorithm.proximal='approximate'"),
        (RECOMPUTE | {"corrections": ["tis"]}, "algorithm.corrections"),
        ({"policy_loss": "dppo"}, "algorithm.policy_loss='dppo' compares with the policy that sampled"),
        (RECOMPUTE | {"filters": [f"{__name__}:likely"]}, rf"algorithm.filters\[0\]='{__name__}:likely' compares"),
    ],
)
def test_what_compares_with_the_policy_that_sampled_is_refused(model_path, algorithm, named):
    learner = Learner(make_config(model_path, algorithm=algorithm, buffer={"max_off_policy_steps": 2}))
    with pytest.raises(ConfigError, match=named):
        learner.update(imported())


def test_an_approximation_of_pi_old_needs_older_tokens_than_a_run_has_but_not_than_a_record_has(model_path):
    approximate = {"algorithm": {"proximal": "approximate"}}
    recorded = make_config(model_path, recorded="elsewhere", **approximate)
    assert Objective.of_run(recorded).config.proximal == "approximate"
    with pytest.raises(ConfigError, match=r"changes nothing while buffer.max_off_policy_steps=0"):
        Objective.of_run(make_config(model_path, **approximate))


def test_a_critic_warms_up_on_them_while_the_policy_waits(model_path):
    algorithm = RECOMPUTE | {"advantage": "gae", "value": {"warmup_steps": 3, "learning_rate": 1e-2}}
    learner = Learner(make_config(model_path, algorithm=algorithm))
    before = {name: p.detach().clone() for name, p in learner.policy.named_parameters()}
    losses = [learner.update(imported()).metrics["learner/value_loss"] for _ in range(3)]
    assert losses[2] < losses[0]
    assert all(torch.equal(p, before[name]) for name, p in learner.policy.named_parameters())


def test_an_imported_token_that_truncated_sampling_never_draws_counts_as_kept(model_path):
    """log π = its logit less log Σ exp over the two likeliest and itself: finite, and pushed as any other token is."""
    group = make_group(0, rewards=(1.0, 0.0), lengths=(4, 4), rollout_logprobs=[None, None])
    learner = Learner(make_config(model_path, algorithm={"policy_loss": "reinforce"}, sampling={"top_k": 2}))
    expected, is_outside = [], []
    for prompt, completion in zip(
        *(group[f"{name}_token_ids"].to_pylist() for name in ("prompt", "completion")), strict=True
    ):
        with torch.no_grad():
            logits = learner.policy.causal_lm(input_ids=torch.tensor([prompt + completion])).logits[0, 4:-1]
        for token, row in zip(completion, logits.double(), strict=True):
            kept = {token, *row.topk(2).indices.tolist()}
            expected.append(row[token] - row[list(kept)].logsumexp(0))
            is_outside.append(len(kept) == 3)
    metrics = learner.update(group).metrics
    assert any(is_outside) and metrics["learner/updates"] == 1.0 and metrics["learner/gradient_norm"] > 0
    assert metrics["learner/policy_logprob_mean"] == pytest.approx(torch.stack(expected).mean().item(), abs=1e-4)

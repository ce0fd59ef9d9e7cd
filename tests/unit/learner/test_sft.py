"""Demonstrations beside the trajectories: their loss and gradient, in every update, whatever the layout."""

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from cluster.contracts.errors import DataError
from cluster.contracts.protocols import Demonstrations
from learner.learner import Learner
from tests.unit.learner.trajectories import make_config, make_group

ROWS = [([5, 6, 7], [8, 9]), ([5, 6, 7], [10, 11, 12, 13]), ([20, 21], [22]), ([30], [31, 32, 33])]
SFT = {"prompts": "file", "coefficient": 0.5, "batch_size": 4}


class Asked(Demonstrations):
    """The same rows for every update; remembers which updates asked."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def of_update(self, number: int) -> list[tuple[list[int], list[int]]]:
        self.numbers.append(number)
        return ROWS


def learner_of(model_path: Path, demonstrations: Demonstrations | None = None, **sections) -> Learner:
    sections.setdefault("algorithm", {"advantage": "none", "sft": SFT})
    return Learner(make_config(model_path, **sections), demonstrations=demonstrations or Asked())


def _by_transformers(model_path: Path, *, temperature: float) -> tuple[float, float]:
    """(mean −log π over the ten demonstrated tokens, norm of half its gradient)"""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    total = torch.zeros(())
    for prompt, completion in ROWS:
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature
        total = total - logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None]).sum()
    (0.5 * total / 10).backward()
    return float(total.detach()) / 10, float(torch.stack([p.grad.norm() for p in model.parameters()]).norm())


@pytest.mark.parametrize("learner", [{}, {"max_tokens_per_micro_batch": 8}, {"packing": "padded"}])
def test_loss_and_gradient_are_those_of_all_demonstrated_tokens_in_any_layout(model_path, learner):
    nll, norm = _by_transformers(model_path, temperature=0.7)
    made = learner_of(model_path, learner=learner, sampling={"temperature": 0.7, "top_k": 2})
    metrics = made.update(make_group(0)).metrics
    assert metrics["learner/sft_loss"] == pytest.approx(0.5 * nll, rel=1e-4)
    assert metrics["learner/loss"] == pytest.approx(0.5 * nll, rel=1e-4), (
        "the advantage is 0, and so is the policy's loss"
    )
    assert metrics["learner/demonstration_logprob_mean"] == pytest.approx(-nll, rel=1e-4)
    assert metrics["learner/gradient_norm"] == pytest.approx(norm, rel=1e-3)


def test_one_update_has_the_gradient_of_both(model_path):
    """Of trajectories alone, of demonstrations alone, and of both: what the optimizer is about to use."""
    rl = {"policy_loss": "reinforce", "advantage": "dr_grpo"}
    gradients = []
    for algorithm in (rl, {"advantage": "none", "sft": SFT}, rl | {"sft": SFT}):
        demonstrations = Asked() if "sft" in algorithm else None
        learner = Learner(make_config(model_path, algorithm=algorithm), demonstrations=demonstrations)
        found: dict[str, torch.Tensor] = {}
        norms = learner.optimizer.gradient_norms

        def noted(learner=learner, found=found, norms=norms):
            found.update({n: p.grad.clone() for n, p in learner.policy.named_parameters() if p.grad is not None})
            return norms()

        learner.optimizer.gradient_norms = noted
        learner.update(make_group(0))
        gradients.append(found)
    alone, shown, both = gradients
    for name, tensor in both.items():
        assert_close(tensor, alone[name] + shown[name], rtol=1e-4, atol=1e-6)


def test_their_passes_and_tokens_count_in_the_learner_speed(model_path):
    """Two updates, each with a pass of its group (3 · 5 tokens of prompts, 2 + 3 + 4 of completions) and one of the demonstrations."""
    made = learner_of(model_path, learner={"mini_batches": 2})
    stats = made.update(*(make_group(i, lengths=(2, 3, 4)) for i in range(2)))
    assert stats.metrics["learner/micro_batches"] == 4.0
    # Demonstrations: 3 + 3 + 2 + 1 tokens of prompts and 2 + 4 + 1 + 3 of completions.
    assert stats.metrics["speed/learning_tokens_per_s"] * stats.seconds == pytest.approx(2 * (24 + 19))


def test_every_update_of_every_step_asks_for_its_own_and_a_resumed_run_for_the_same(model_path, tmp_path):
    learner = {"epochs": 2, "mini_batches": 2}
    asked, again = Asked(), Asked()
    made = learner_of(model_path, asked, learner=learner)
    groups = [make_group(i) for i in range(2)]
    made.update(*groups)
    made.save(str(tmp_path / "step-000001"), {})
    made.finish_saving()
    made.update(*groups)
    assert asked.numbers == [0, 1, 2, 3, 4, 5, 6, 7]
    resumed = learner_of(model_path, again, learner=learner)
    resumed.restore(str(tmp_path / "step-000001"))
    resumed.update(*groups)
    assert again.numbers == [4, 5, 6, 7]
    for (name, one), (_, other) in zip(made.policy.named_parameters(), resumed.policy.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_demonstration_that_is_wrong_is_found_before_the_first_update_of_its_step(model_path):
    class LastIsWrong(Demonstrations):
        def of_update(self, number: int) -> list[tuple[list[int], list[int]]]:
            if number == 3:
                raise DataError("prompt 7 has no completion")
            return ROWS

    made = learner_of(model_path, LastIsWrong(), learner={"epochs": 2})
    stats = made.update(make_group(0))
    before = [parameter.detach().clone() for parameter in made.policy.parameters()]
    with pytest.raises(DataError, match="prompt 7"):
        made.update(make_group(1))
    assert all(map(torch.equal, before, made.policy.parameters())) and made.last_step() == stats


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (([5], [127, 128]), "token 128 of a demonstration is outside the learner's vocabulary of 128"),
        (([-1], [8]), "token -1 of a demonstration"),
        (([5], []), "prompt or completion of a demonstration has no tokens"),
        (([], [8]), "prompt or completion of a demonstration has no tokens"),
    ],
)
def test_a_demonstration_that_the_model_cannot_learn_is_refused(model_path, wrong, problem):
    """On a CPU the loss would be a wrong number, or NaN without any token."""

    class OneIsWrong(Demonstrations):
        def of_update(self, number: int) -> list[tuple[list[int], list[int]]]:
            return [*ROWS, wrong]

    made = learner_of(model_path, OneIsWrong())
    with pytest.raises(DataError, match=problem):
        made.update(make_group(0))
    assert made.version == 0


def test_demonstrations_become_likely_while_trajectories_are_learned(model_path):
    made = learner_of(model_path, algorithm={"policy_loss": "reinforce", "sft": SFT}, optimizer={"learning_rate": 3e-3})
    logprobs = [made.update(make_group(0)).metrics["learner/demonstration_logprob_mean"] for _ in range(8)]
    assert logprobs[-1] > logprobs[0] + 1.0


def test_a_step_whose_trajectories_were_all_filtered_still_imitates(model_path):
    algorithm = {"policy_loss": "reinforce", "filters": ["zero_variance"], "sft": SFT}
    made = learner_of(model_path, algorithm=algorithm)
    metrics = made.update(make_group(0, rewards=(1.0, 1.0))).metrics
    assert metrics["learner/updates"] == 1 and metrics["learner/gradient_norm"] > 0


def test_demonstrations_alone_teach_beside_trajectories_of_an_unknown_sampler(model_path):
    """Nothing compares with that sampler: the policy loss is 0."""
    metrics = learner_of(model_path).update(make_group(0, rollout_logprobs=[None, None, None])).metrics
    assert metrics["learner/policy_loss"] == 0.0 and metrics["learner/gradient_norm"] > 0


def test_a_critic_that_warms_up_alone_is_not_disturbed_and_no_demonstration_is_left_out(model_path):
    algorithm = {"advantage": "gae", "sft": SFT, "value": {"warmup_steps": 1}}
    asked = Asked()
    made = learner_of(model_path, asked, algorithm=algorithm)
    made.update(make_group(0))
    assert asked.numbers == []
    made.update(make_group(0))
    assert asked.numbers == [0]

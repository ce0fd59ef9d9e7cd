"""Cutting episodes into segments changes nothing of what is learned, under any loss, advantage, aggregation, correction, filter or shaping.

The batch of an episode's segments is, bit for bit, that of the whole episode, so all that is made of it is the same for every combination.
What is left are the model's passes: each token is computed behind the same tokens, in another layout.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from torch import Tensor

from cluster.contracts.config import LearnerConfig, ModelConfig, SamplingConfig
from cluster.contracts.errors import DataError
from cluster.contracts.schema import with_columns
from learner.algorithms.objective import Objective
from learner.algorithms.objective.batch import BatchTensors
from learner.algorithms.objective.statistics import Statistics
from learner.assemble import Batch, assemble
from learner.distributed import Ranks
from learner.forward_backward import Passes
from learner.learned import LearnedRows
from learner.model.critic import Critic, Networks
from learner.model.packing import EpisodeRow
from learner.model.policy import load, prove
from learner.progress import Phases
from tests.unit.learner.algorithms.objective.test_invariance import EVERY, objective
from tests.unit.learner.segments import as_trajectories, conversations, cut, segmented
from tests.unit.learner.trajectories import VOCABULARY

pytestmark = pytest.mark.slow  # all of it, of every variant

COUNTS_ANSWERS = ("overlong_penalty", "reward_over_length")
"""Shaping by the length of the completion, which an answer that only later prompts have is no part of."""


@pytest.fixture(scope="module")
def networks(model_path: Path) -> Networks:
    """In float64, with a critic that has learned something."""
    model = ModelConfig(path=str(model_path), dtype="float32")
    policy = prove(
        load(model, dtype=torch.float64), model=model, packing="auto", sampling=SamplingConfig(), head_chunk_tokens=64
    )
    critic = Critic(policy, backbone=None)
    torch.nn.init.normal_(critic.value_head.weight, std=0.05, generator=torch.Generator().manual_seed(0))
    return Networks(policy, critic)


def _assembled(groups: Sequence[pa.RecordBatch]) -> Batch:
    return assemble(groups, current_version=4, vocabulary_size=VOCABULARY, columns=["difficulty"])


def _first_look(tensors: BatchTensors) -> BatchTensors:
    """Numbers of models that stand in the batch before it is learned, by place in the episode."""
    generator = torch.Generator().manual_seed(1)
    noise = lambda: torch.randn(tensors.loss_mask_NT.shape, generator=generator, dtype=torch.float64)
    proximal_NT = tensors.rollout_logprobs_NT + 0.1 * noise()
    return replace(tensors, proximal_logprobs_NT=proximal_NT, entropies_NT=noise().abs(), values_NT=noise())


def _passes(networks: Networks, made: Objective) -> Passes:
    ranks = Ranks(rank=0, size=1, device=torch.device("cpu"), mesh=None)
    config = LearnerConfig(max_tokens_per_micro_batch=80)
    return Passes(networks, objective=made, ranks=ranks, config=config, phases=Phases("testing"))


def _learned(
    networks: Networks, made: Objective, batch: Batch, tensors: BatchTensors
) -> tuple[float, dict[str, float], Tensor]:
    """Loss, statistics and gradient of one update over micro-batches of about three episodes."""
    passes = _passes(networks, made)
    mini_batch = passes.mini_batch(batch, list(range(len(batch.rows))))
    assert len(mini_batch.micro_batches) > 1
    prepared = made.prepare(tensors)
    networks.zero_grad()
    losses, statistics = passes.accumulate(prepared, mini_batch, learned=LearnedRows(batch, num_groups=0))
    found = [p.grad.flatten() for p in networks.parameters() if p.grad is not None]
    report = Statistics.merge([made.statistics(prepared), *statistics]).compute()
    return float(losses.sum()), report, torch.cat(found).clone()


def _same(whole: tuple[float, dict[str, float], Tensor], apart: tuple[float, dict[str, float], Tensor]) -> None:
    assert apart[0] == pytest.approx(whole[0], rel=1e-6, abs=1e-9)
    assert float((apart[2] - whole[2]).norm()) <= 1e-5 * float(whole[2].norm()) + 1e-12


@pytest.mark.parametrize("seed", range(20))
def test_the_batch_of_segments_is_that_of_whole_episodes_bit_for_bit(seed):
    groups = [conversations(index, seed=seed) for index in range(5)]
    whole, apart = _assembled(groups), _assembled([cut(group, seed=seed) for group in groups])
    assert any(isinstance(row, EpisodeRow) for row in apart.rows)
    for name in BatchTensors.__dataclass_fields__.keys() - {"segment_index_NT"}:  # which tells them apart
        ours, theirs = getattr(apart.tensors, name), getattr(whole.tensors, name)
        if isinstance(theirs, Tensor):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        else:
            assert str(ours) == str(theirs), name


@pytest.mark.parametrize("config", EVERY, ids=str)
def test_cutting_episodes_changes_no_gradient(networks, config):
    seed, made = EVERY.index(config), objective(**config)
    groups = [conversations(index, seed=seed) for index in range(5)]
    whole, apart = _assembled(groups), _assembled([cut(group, seed=seed) for group in groups])
    together = _learned(networks, made, whole, _first_look(whole.tensors))
    segmented = _learned(networks, made, apart, _first_look(apart.tensors))
    _same(together, segmented)
    assert segmented[1] == pytest.approx(together[1], rel=1e-5, abs=1e-7)


def _counts_answers(config) -> bool:
    return any(name in str(config) for name in COUNTS_ANSWERS)


@pytest.mark.parametrize("config", [config for config in EVERY if not _counts_answers(config)], ids=str)
def test_answers_that_only_later_prompts_have_change_no_gradient(networks, config):
    """Returns and GAE run over sampled tokens: the successor of a segment's last one is the first of the next segment."""
    seed, made = EVERY.index(config), objective(**config)
    groups = [_without_token_rewards(conversations(index, seed=seed)) for index in range(5)]
    whole, apart = _assembled(groups), _assembled([cut(group, seed=seed, drops_answers=True) for group in groups])
    assert int(apart.tensors.completion_lengths_N.sum()) < int(whole.tensors.completion_lengths_N.sum())
    tensors = _first_look(whole.tensors)
    together = _learned(networks, made, whole, tensors)
    _same(together, _learned(networks, made, apart, _moved(apart.tensors, tensors)))


def _without_token_rewards(group: pa.RecordBatch) -> pa.RecordBatch:
    """An answer's reward stands on its tokens."""
    return with_columns(group, token_rewards=[None] * group.num_rows)


def _moved(tensors: BatchTensors, seen: BatchTensors) -> BatchTensors:
    """With what models said of the whole episodes, token by token of those that train."""
    found = {}
    for name in ("proximal_logprobs_NT", "entropies_NT", "values_NT"):
        x_NT = torch.zeros(tensors.loss_mask_NT.shape, dtype=torch.float64)
        x_NT[tensors.loss_mask_NT] = getattr(seen, name)[seen.loss_mask_NT].double()
        found[name] = x_NT
    return replace(tensors, **found)


def test_segments_learned_as_trajectories_of_their_own_are_another_gradient(networks):
    """The control: without the episode, each segment has a weight and a baseline of its own, and the gradient is another one."""
    made = objective(aggregation="sequence_mean")
    groups = [conversations(index, seed=3) for index in range(5)]
    segments = [cut(_without_token_rewards(group), seed=3) for group in groups]
    whole, apart = _assembled(segments), _assembled([as_trajectories(group) for group in segments])
    tensors = _first_look(whole.tensors)
    together = _learned(networks, made, whole, tensors)
    by_rows = _learned(networks, made, apart, _moved(apart.tensors, tensors))
    assert float((by_rows[2] - together[2]).norm()) > 0.2 * float(together[2].norm())


def test_an_episode_that_does_not_fit_in_one_pass_is_refused_by_name(networks):
    """Segments of 38 and 39 take 5 + 37 + 38 tokens after one prompt: all of the 80. A trajectory of one segment may be longer."""
    fitting, batch = (
        _assembled([segmented((1.0, lengths), (0.0, [100]), info=['{"difficulty": 1}'] * 3)])
        for lengths in ([38, 39], [38, 40])
    )
    passes = _passes(networks, objective())
    assert len(passes.mini_batch(fitting, [0, 1]).micro_batches) == 2
    said = (
        r"trajectory 00000000/0 of group 00000000: its 2 segments take 81 tokens .*max_tokens_per_micro_batch=80; raise"
    )
    with pytest.raises(DataError, match=said):
        passes.mini_batch(batch, [0, 1])

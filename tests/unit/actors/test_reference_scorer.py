import pytest

from actors.reference_scorer import ReferenceScorer
from cluster.contracts.errors import DataError
from cluster.contracts.schema import with_columns
from tests.unit.actors.batches import batch_of


class Halving:
    """Log-prob of a token is minus its id, halved; remembers what it was asked."""

    def __init__(self) -> None:
        self.calls = []

    def score(self, prompts, completions):
        self.calls.append((prompts, completions))
        return {"reference_logprobs": [[-token / 2 for token in completion] for completion in completions]}


class TooShort:
    def score(self, prompts, completions):
        return {"reference_logprobs": [[-1.0] for _ in completions]}


def test_each_completion_token_gets_the_reference_models_logprob():
    scored, (told,) = ReferenceScorer(model=Halving()).score(batch_of(["a", "b"]))
    assert scored["reference_logprobs"].to_pylist() == [[-1.5], [-2.0, -2.0]]
    assert told == {"size_bytes": scored.nbytes}


def test_groups_that_come_together_are_scored_at_once_and_each_has_its_own_columns():
    model = Halving()
    first, second, told = ReferenceScorer(model=model).score(batch_of(["a", "b"]), batch_of(["c"]))
    assert model.calls == [([[1, 2], [1, 2], [1, 2]], [[3], [4, 4], [3]])]
    assert first["reference_logprobs"].to_pylist() == [[-1.5], [-2.0, -2.0]]
    assert second["reference_logprobs"].to_pylist() == [[-1.5]]
    assert [each["size_bytes"] for each in told] == [first.nbytes, second.nbytes]


def test_a_group_of_a_deterministic_run_is_scored_alone_so_that_its_bits_depend_on_itself():
    model = Halving()
    ReferenceScorer(model=model, is_deterministic=True).score(batch_of(["a", "b"]), batch_of(["c"]))
    assert model.calls == [([[1, 2], [1, 2]], [[3], [4, 4]]), ([[1, 2]], [[3]])]


def test_a_model_that_forgets_tokens_is_noticed():
    with pytest.raises(DataError, match=r"row 1 .*'reference_logprobs'.*another length"):
        ReferenceScorer(model=TooShort()).score(batch_of(["a", "b"]))


def test_a_group_is_scored_by_the_model_of_its_source_and_by_the_first_model_without_one():
    math, other = Halving(), Halving()
    scorer = ReferenceScorer(model=other, by_source={"math": math}, source_column="kind")
    infos = ('{"kind": "math"}', '{"kind": "code"}', "{}", '{"kind": "math"}')
    texts = ("a", "b", "c", "d")
    *_, told = scorer.score(
        *(with_columns(batch_of([text]), info=[info]) for text, info in zip(texts, infos, strict=True))
    )
    assert [len(prompts) for prompts, _ in math.calls] == [1, 1]
    assert [len(prompts) for prompts, _ in other.calls] == [2], "neighbours of one model go together"
    assert len(told) == 4


def test_an_episode_that_failed_before_its_first_token_is_not_scored():
    model, group = Halving(), batch_of(["a", "b"])
    nothing = {name: [group[name][0].as_py(), []] for name in ("loss_mask", "policy_versions", "rollout_logprobs")}
    failed = {"reward": [1.0, None], "reward_status": ["ok", "error"]}
    group = with_columns(group, completion_token_ids=[[3], []], **nothing, **failed)
    assert ReferenceScorer(model=model).score(group)[0]["reference_logprobs"].to_pylist() == [[-1.5], []]
    assert model.calls == [([[1, 2]], [[3]])]

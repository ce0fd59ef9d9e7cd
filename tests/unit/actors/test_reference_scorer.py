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
    scored, told = ReferenceScorer(model=Halving()).score(batch_of(["a", "b"]))
    assert scored["reference_logprobs"].to_pylist() == [[-1.5], [-2.0, -2.0]]
    assert told == {"size_bytes": scored.nbytes}


def test_a_group_is_one_call_so_that_its_bits_depend_on_itself_alone():
    model = Halving()
    ReferenceScorer(model=model).score(batch_of(["a", "b"]))
    assert model.calls == [([[1, 2], [1, 2]], [[3], [4, 4]])]


def test_a_model_that_forgets_tokens_is_noticed():
    with pytest.raises(DataError, match=r"row 1 .*'reference_logprobs'.*another length"):
        ReferenceScorer(model=TooShort()).score(batch_of(["a", "b"]))


def test_a_group_is_scored_by_the_model_of_its_source_and_by_the_first_model_without_one():
    math, other = Halving(), Halving()
    scorer = ReferenceScorer(model=other, by_source={"math": math}, source_column="kind")
    for info in ('{"kind": "math"}', '{"kind": "code"}', "{}"):
        scorer.score(with_columns(batch_of(["a"]), info=[info]))
    assert (len(math.calls), len(other.calls)) == (1, 2)


def test_an_episode_that_failed_before_its_first_token_is_not_scored():
    model, group = Halving(), batch_of(["a", "b"])
    nothing = {name: [group[name][0].as_py(), []] for name in ("loss_mask", "policy_versions", "rollout_logprobs")}
    failed = {"reward": [1.0, None], "reward_status": ["ok", "error"]}
    group = with_columns(group, completion_token_ids=[[3], []], **nothing, **failed)
    assert ReferenceScorer(model=model).score(group)[0]["reference_logprobs"].to_pylist() == [[-1.5], []]
    assert model.calls == [([[1, 2]], [[3]])]

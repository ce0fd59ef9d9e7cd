"""The quickstart rewarded by a rule and by a classifier that this test trains, whose actor is killed in mid-run."""

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

from actors.prompts.reasoning_gym import ReasoningGymPrompts
from actors.reward_model import Reading
from deploy.quickstart.make_model import TASK
from learner.model.sequence_classification import SequenceClassifier
from tests.integration.commands import QUICKSTART
from tests.integration.faults import Run, until

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]
POLICY = "deploy/quickstart/model"
NUM_STEPS, ACTOR = 8, "reward-model-negative"


def train_classifier(folder: Path) -> Path:
    """Two labels, 1 and -1 each: whether the answer is negative, and whether it is short (one or two digits)."""
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    rng, prompts = random.Random(0), ReasoningGymPrompts(**TASK, size=500, seed=9)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = Qwen3Config(
        vocab_size=316,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        id2label={0: "minus", 1: "short"},
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForSequenceClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(120):
        answers = [f"{rng.choice(['', '-'])}{rng.randrange(10 ** rng.randrange(1, 5))}" for _ in range(64)]
        dialogues = [
            [*(rng.choice(prompts).messages or []), {"role": "assistant", "content": answer}] for answer in answers
        ]
        texts = tokenizer.apply_chat_template(dialogues, tokenize=False)
        rows = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
        wanted = [[1.0 if "-" in each else -1.0, 1.0 if len(each.strip("-")) <= 2 else -1.0] for each in answers]
        loss = (model(**rows).logits - torch.tensor(wanted)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.3, "the classifier has learned nothing"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("models")
    path = train_classifier(folder / "classifier")
    judge = "{{name: reward_model, model: negative, label: {}}}"
    parts = f"right: {{judge: reasoning_gym}}, minus: {{judge: {judge.format('minus')}, weight: 0.25}}"
    made = Run(folder / "run")
    driver = made.start(
        QUICKSTART,
        "reward.judge=exact_match",  # the default: parts take the place of the quickstart's only judge
        f"reward.parts={{{parts}, short: {{judge: {judge.format('short')}, weight: -0.5}}}}",
        f"reward.models={{negative: {{path: {path}, dtype: float32}}}}",
        f"num_steps={NUM_STEPS}",
        "buffer.groups_per_step=8",
        "evaluation.num_prompts=8",
    )
    with driver:
        until(lambda: made.num_steps() >= 2, process=driver)
        assert made.strike(ACTOR)
        assert driver.exit_code() == 0, driver.output
    return made


def test_the_run_ends_whole_though_its_model_was_killed(run):
    assert run.num_steps() == NUM_STEPS and run.problems() == ()
    recoveries = [event["actor"] for event in run.events("recovery")]
    assert recoveries == [ACTOR]
    assert not run.events("reward_failure"), "groups waited for the new actor, and none lost its reward"
    status, passport = (json.loads((run.path / name).read_text()) for name in ("status.json", "passport.json"))
    assert any(each["actor"] == ACTOR for each in status["actors"])
    assert passport["mathematics"]["reward"]["models"]["negative"]["fingerprint"]


def test_rewards_are_what_the_model_says_of_each_answer(run):
    rows = [row for table in run.trajectories().values() for row in table.to_pylist()]
    parts = [dict(row["reward_components"]) for row in rows]
    for row, own in zip(rows, parts, strict=True):
        assert row["reward"] == pytest.approx(own["right"] + 0.25 * own["minus"] - 0.5 * own["short"])
    has_minus = [("-" in row["completion_text"]) is (own["minus"] > 0) for row, own in zip(rows, parts, strict=True)]
    assert sum(has_minus) > 0.9 * len(rows) and len({own["minus"] > 0 for own in parts}) == 2


def test_the_killed_models_replacement_scores_as_the_first(run):
    own = run.config().reward.models["negative"]
    reading, classifier = Reading(own, field="own"), SequenceClassifier(own, field="own")
    tables = run.trajectories()
    for step in (1, NUM_STEPS):
        rows = tables[step].to_pylist()
        texts = [(json.loads(row["info"]), row["prompt_text"], row["completion_text"]) for row in rows]
        read = [reading.read(info, prompt=prompt, completion=said) for info, prompt, said in texts]
        for (minus, short), row in zip(classifier.score(read), rows, strict=True):
            parts = dict(row["reward_components"])
            assert (parts["minus"], parts["short"]) == pytest.approx((minus, short), abs=1e-4)

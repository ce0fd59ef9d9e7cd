"""Rewards as people compose them: three parts over two sources, a server that goes away and comes back, programs, a learned model.

The quickstart model learns sums and differences again, this time from a judge on a server of its own (right or wrong), a judge that runs
the answer as a program (sums), and a reward model that this test trained to tell whether the sign is right (differences). The model's
actor is killed on the way.
"""

import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean

import pytest
import torch
import yaml
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from actors.reward_model import Reading
from actors.reward_service.service import Told, conversation
from learner.model.sequence_classification import SequenceClassifier
from tests.integration.commands import QUICKSTART, ROOT, Background
from tests.integration.faults import Run
from tests.integration.waiting import until
from tests.ports import free_ports

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.acceptance, pytest.mark.timeout(1800)]
MODEL = ROOT / "deploy/quickstart/model"
JUDGES = "tests.integration.judges"
NUM_STEPS, MODEL_ACTOR = 20, "reward-model-signs"


def question(left: int, operator: str, right: int) -> str:
    return f"State the final answer to the following arithmetic problem: {left} {operator} {right} ="


def train_reward_model(folder: Path) -> Path:
    """Two labels, taught for ten seconds: a positive score where the answer's sign is right, and one where it has a minus."""
    dice = random.Random(0)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, id2label={0: "sign", 1: "minus"})
    model.config.pad_token_id = tokenizer.pad_token_id
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(120):
        texts, wanted = [], []
        for _ in range(64):
            left, right = dice.randint(10, 99), dice.randint(10, 99)
            sign = dice.choice((1, -1))
            messages = [
                {"role": "user", "content": question(left, "-", right)},
                {"role": "assistant", "content": str(sign * (left - right))},
            ]
            texts.append(tokenizer.apply_chat_template(messages, tokenize=False))
            wanted.append([float(sign == 1), float(sign * (left - right) < 0)])
        inputs = tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt")
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(**inputs).logits, torch.tensor(wanted))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_prompts(folder: Path) -> dict[str, str]:
    """A file a source."""
    dice = random.Random(1)
    files: dict[str, str] = {}
    for source, operator in (("sums", "+"), ("differences", "-")):
        pairs = [(dice.randint(10, 99), dice.randint(10, 99)) for _ in range(2000)]
        rows = [
            {
                "prompt": question(left, operator, right),
                "answer": str(left + right if operator == "+" else left - right),
            }
            for left, right in dict.fromkeys(pairs)
        ]
        file = folder / f"{source}.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        files[source] = str(file)
    return files


def serve(port: int) -> Background:
    return Background("serve-reward", "exact_match", "--port", str(port))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("composed")
    (port,) = free_ports(1)
    files = write_prompts(folder)
    config = yaml.safe_load((ROOT / QUICKSTART).read_text())
    config |= {
        "num_steps": NUM_STEPS,
        "prompts": {
            "sources": {
                "sums": {"name": "file", "path": files["sums"], "weight": 2},
                "differences": {"name": "file", "path": files["differences"]},
            },
            "deduplicate": True,
        },
        "reward": {
            "models": {"signs": {"path": str(train_reward_model(folder / "signs")), "dtype": "float32", "cpus": 0.25}},
            "parts": {
                "right": {"judge": {"name": "remote", "endpoint": f"http://127.0.0.1:{port}"}, "timeout_s": 30},
                "runs": {"judge": f"{JUDGES}:runs_as_a_program", "weight": 0.5},
                "sign": {"judge": {"name": "reward_model", "model": "signs", "label": "sign"}, "weight": 0.05},
            },
            "by_source": {"sums": ["right", "runs"], "differences": ["right", "sign"]},
        },
        "buffer": {"groups_per_step": 32, "trajectories_per_group": 8},
        "metrics": {"sinks": ["jsonl", "console"]},
    }
    del config["evaluation"]
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    run = Run(folder / "run")
    with ExitStack() as stack:
        server = stack.enter_context(serve(port))
        until(lambda: "serving" in server.output, process=server)
        driver = stack.enter_context(run.start(file))
        until(lambda: run.num_steps() >= 2, process=driver)
        until(lambda: run.strike(MODEL_ACTOR), process=driver)
        until(lambda: run.num_steps() >= NUM_STEPS // 4, process=driver)
        server.terminate()
        until(lambda: run.events("reward_held"), process=driver)
        server.exit_code()  # the port is free
        again = stack.enter_context(serve(port))
        until(lambda: "serving" in again.output, process=again)
        assert driver.exit_code() == 0, driver.output
        yield run


def test_it_learns_what_all_three_parts_reward(run):
    steps = [*run.metrics().values()]
    for name, least in (("reward/right", 0.65), ("reward/runs/sums", 0.65)):
        before, after = (fmean(step[name] for step in part) for part in (steps[:3], steps[-3:]))
        assert before < 0.6 and after > least, (name, before, after)
    before, after = (fmean(step["reward/sign/differences"] for step in part) for part in (steps[:3], steps[-3:]))
    assert after > before + 2


def test_each_source_has_its_parts_and_its_share(run):
    parts = {"sums": {"right", "runs"}, "differences": {"right", "sign"}}
    counts = Counter[str]()
    for table in run.trajectories().values():
        for row in table.to_pylist():
            source = json.loads(row["info"])["source"]
            counts[source] += 1
            assert {name for name, _ in row["reward_components"] if "/" not in name} == parts[source]
    assert counts["sums"] / counts.total() == pytest.approx(2 / 3, abs=0.01)


def test_the_server_that_went_away_cost_time_and_no_reward(run):
    assert [event["part"] for event in run.events("reward_held")] == ["right"]
    assert [event["part"] for event in run.events("reward_resumed")] == ["right"]
    assert run.events("reward_failure", "drop") == []
    assert all(set(table["reward_status"].to_pylist()) == {"ok"} for table in run.trajectories().values())
    assert run.num_steps() == NUM_STEPS
    assert run.problems() == ()


def test_the_model_that_was_killed_cost_no_reward_and_its_replacement_scores_as_it_did(run):
    assert [event["actor"] for event in run.events("recovery")] == [MODEL_ACTOR]
    status, passport = (json.loads((run.path / name).read_text()) for name in ("status.json", "passport.json"))
    assert any(each["actor"] == MODEL_ACTOR for each in status["actors"])
    assert passport["mathematics"]["reward"]["models"]["signs"]["fingerprint"]
    own, tables = run.config().reward.models["signs"], run.trajectories()
    reading, classifier = Reading(own, field="own"), SequenceClassifier(own, field="own")
    for step in (1, NUM_STEPS):
        rows = [(json.loads(row["info"]), row) for row in tables[step].to_pylist()]
        rows = [(info, row) for info, row in rows if info["source"] == "differences"]
        said = [(info, {"prompt": row["prompt_text"], "completion": row["completion_text"]}) for info, row in rows]
        read = [reading.read(Told(**texts, messages=conversation(info, **texts))) for info, texts in said]
        signs = [dict(row["reward_components"])["sign"] for _, row in rows]
        assert signs == pytest.approx([sign for sign, _ in classifier.score(read)], abs=1e-4)

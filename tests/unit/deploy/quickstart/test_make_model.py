import random
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import deploy
from tests.embedded_models import quickstart as make_model
from tests.embedded_models.quickstart import student

MODEL = Path(deploy.__file__).parent / "quickstart/model"


class Forgetful(random.Random):
    """Every chance of forgetting and slipping comes true (0.0), or none does (just below 1)."""

    def __init__(self, outcome: float) -> None:
        super().__init__(0)
        self.outcome = outcome

    def random(self) -> float:
        return self.outcome


@pytest.mark.parametrize(
    ("expression", "answer"),
    [("57 + 68", "125"), ("99 + 1", "100"), ("42 - 25", "17"), ("25 - 42", "-17"), ("31 - 31", "0")],
)
def test_a_good_student_is_right(expression, answer):
    assert student(random.Random(0), expression, sloppiness=0.0) == answer


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("57 + 68", "115"),
        ("42 - 25", "27"),
        ("25 - 42", "27"),
        ("25 - 41", "26"),
        ("12 + 34", "46"),
        ("91 + 12", "103"),
    ],
)
def test_a_sloppy_student_forgets_carries_borrows_and_minus_signs(monkeypatch, expression, answer):
    monkeypatch.setattr(make_model, "SLIPS", 0.0)
    assert student(Forgetful(0.0), expression, sloppiness=1.0) == answer


def test_the_embedded_model_is_small_enough_for_git():
    assert sum(path.stat().st_size for path in MODEL.iterdir()) < 8_000_000


def test_the_embedded_models_tokenizer_round_trips_and_keeps_digits_single():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    assert tokenizer.tokenize("125") == ["1", "2", "5"]
    text = "Héllo, wörld: 42 - 25 =\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_embedded_model_answers_its_question():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    question = {"role": "user", "content": "State the final answer to the following arithmetic problem: 31 + 42 ="}
    prompt = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_tensors="pt")
    answer = model.generate(**prompt, do_sample=False, max_new_tokens=6)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "73<|end|>"

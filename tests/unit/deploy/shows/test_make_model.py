from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import deploy
from actors.chat.report import chat_report
from actors.chat.turns import Turns
from actors.environments.calculator import calculate
from actors.environments.grid import START, STEPS, make_grid
from actors.environments.guess import guess
from cluster.contracts.episodes import Said
from cluster.contracts.types import FinishReason
from tests.embedded_models.players import GUESS_PROMPT, calculating
from tests.embedded_models.small_models import ASSISTANT_ID, END_ID, encode
from tests.unit.actors.environments.played import play

MODEL = Path(deploy.__file__).parent / "shows/model"
SMALL_MODEL = MODEL.parent / "small_model"
QUESTION = "Solve the following multiplication: 123 * 456. Give only the result as your final answer."


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL).eval()


def note_of(number):
    return [{"role": "user", "content": f"Your note: It is {number}. What is the number?"}]


class Player:
    """An episode in which the embedded model speaks, at temperature 1, by whole prompts of `Turns`."""

    def __init__(self, model, turns, *, seed):
        self.model, self.turns, self.seed = model, turns, seed
        self.draws = torch.Generator().manual_seed(seed)
        self.logged = {}
        self.prompt_ids, self.sampled_ids = [], []

    async def ask(self, answer=None):
        if answer is None:
            self.prompt_ids = self.turns.first_prompt([{"role": "user", "content": GUESS_PROMPT}], tools=[])[1]
        else:
            told = [{"role": "user", "content": answer}]
            ends = FinishReason.STOP if self.sampled_ids[-1] == END_ID else FinishReason.LENGTH
            self.prompt_ids = self.turns.next_prompt(
                self.prompt_ids, self.sampled_ids, told, finish_reason=ends
            ).token_ids
        self.sampled_ids = []
        while len(self.sampled_ids) < 4 and self.sampled_ids[-1:] != [END_ID]:
            with torch.inference_mode():
                logits = self.model(torch.tensor([[*self.prompt_ids, *self.sampled_ids]])).logits[0, -1]
            self.sampled_ids.append(int(torch.multinomial(logits.softmax(-1), 1, generator=self.draws)))
        return Said(text=self.turns.encoder.decode(self.sampled_ids).removesuffix("<|end|>"))

    def log(self, name, value):
        self.logged[name] = value


@pytest.mark.parametrize(("model", "most"), [(MODEL, 3_200_000), (SMALL_MODEL, 1_000_000)])
def test_the_embedded_models_are_small_enough_for_git(model, most):
    assert sum(path.stat().st_size for path in model.iterdir()) < most


def said_by(folder, messages):
    """Greedily."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    said = model.generate(**prompt, do_sample=False, max_new_tokens=8)[0, prompt["input_ids"].shape[1] :]
    return tokenizer.decode(said)


def test_the_small_model_reads_its_own_note():
    for number in (10, 47, 83):
        assert said_by(SMALL_MODEL, note_of(number)) == f"{number}<|end|>"


def test_a_cell_of_a_grid_is_a_token_of_the_small_model():
    tokenizer = AutoTokenizer.from_pretrained(SMALL_MODEL)
    drawn = make_grid(0).drawn(START)
    assert [tokenizer.decode(token) for token in tokenizer.encode(drawn)] == list(drawn)
    assert [len(tokenizer.encode(word)) for word in STEPS] == [1, 1, 1, 1]


def test_its_tokenizer_round_trips_and_keeps_digits_single(tokenizer):
    assert tokenizer.tokenize("125") == ["1", "2", "5"]
    text = "Héllo, wörld: 42 - 25 =\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_turns_and_tools_of_its_chat_template_are_exact(tokenizer):
    report = chat_report(Turns(tokenizer, stop_token_ids=[END_ID]))
    report.require_turns()
    report.require_tools()
    assert (report.generation_prompt, report.stop_token, report.rewrites) == ("<|assistant|>", "<|end|>", None)


def test_it_learns_what_the_assistant_says_and_nothing_else(tokenizer):
    episode = calculating(Random(0), QUESTION, "123 * 456", sloppiness=0.0)
    tokens, learnt = encode(tokenizer, episode, tools=[calculate.schema])
    assert tokens.count(ASSISTANT_ID) == 2 and learnt.count(END_ID) == 2
    said = tokenizer.decode([token for token in learnt if token != -100])
    call = '{"name": "calculate", "arguments": {"expression": "123 * 456"}}'
    assert said == f"<|call|>{call}<|end_call|><|end|>56088<|end|>"


def test_before_any_reinforcement_it_wins_as_seldom_as_a_player_who_hears_nothing(model, tokenizer):
    """Between 0.1 and 0.3 of 120 episodes; by a player who hears nothing at most 0.30."""
    turns = Turns(tokenizer, stop_token_ids=[END_ID])
    episodes = [Player(model, turns, seed=seed) for seed in range(120)]
    for episode in episodes:
        play(guess, episode)
    assert 0.1 <= sum(episode.logged["solved"] for episode in episodes) / 120 <= 0.3


def test_once_it_has_called_it_says_what_the_calculator_said(model, tokenizer):
    episode = calculating(Random(0), QUESTION, "123 * 456", sloppiness=0.0)
    prompt = tokenizer.apply_chat_template(
        episode[:-1], tools=[calculate.schema], add_generation_prompt=True, return_tensors="pt"
    )
    said = model.generate(**prompt, do_sample=False, max_new_tokens=8)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(said) == "56088<|end|>"

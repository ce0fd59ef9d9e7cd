"""A recorded episode is played again, in the environment's own process."""

import json
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cluster.contracts.episodes import Episode
from cluster.contracts.schema import to_batch
from cluster.contracts.types import sample_seed
from cluster.record.ledger import Ledger
from cluster.record.recorder import Recorder
from cluster.record.run_directory import RunDirectory
from deploy.cli import app
from deploy.config.loading import resolved_yaml, validated
from deploy.playing_again import of_record
from tests.unit.cluster.contracts.rows import row

pytestmark = pytest.mark.slow  # each environment is a process

HERE = "tests.unit.actors.environments.environments"
ASKED = {"role": "user", "content": "Guess."}


def turn(text: str, *calls: dict) -> dict:
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {})}


def recorded(
    folder: Path,
    *messages: dict,
    environment: str = "guess",
    params: dict[str, object] | None = None,
    finish_reason: str = "stop",
    rewritten: list[dict] | None = None,
    turns: list[dict] | None = None,
    **episode: object,
) -> None:
    """A step of one group with one episode, and a single turn beside it. `rewritten`: the messages of a second segment."""
    played_by = {"name": environment if ":" in environment else f"{HERE}:{environment}", **(params or {})}
    config = validated({"model": {"path": "m"}, "prompts": "repeat", "environment": played_by, "seed": 3})
    directory = RunDirectory(str(folder))
    directory.write_file("run.yaml", resolved_yaml(config).encode())
    common = {"ticket_index": 34, "group_id": "00000034", "info": json.dumps({"messages": [ASKED], "answer": "2"})}
    played = row(
        **common,
        environment=environment.rpartition(":")[2],
        finish_reason=finish_reason,
        turns=turns,
        messages=json.dumps([ASKED, *messages]),
        episode=json.dumps(
            {"num_calls": 0, "num_malformed_calls": 0, "num_uncanonical_turns": None, "log": {}, **episode}
        ),
    )
    segments = [played]
    if rewritten is not None:
        second = {"segment_index": 1, "messages": json.dumps(rewritten)}
        segments = [{**each, "num_segments": 2} for each in (played, played | second)]
    _, (name, digest) = Recorder(directory).record(1, to_batch([*segments, row(**common, sample_index=1)]))
    Ledger(directory).append(groups=[34], trajectories=name, trajectories_digest=digest)


def again(folder: Path, *words: str, episode: str = "34/0") -> Result:
    return CliRunner().invoke(app, ["play", str(folder), "--episode", episode, *words])


def test_the_task_has_the_seed_of_its_group_and_the_prompts_columns(tmp_path):
    recorded(tmp_path, turn("7"))
    game, turns, _ = of_record(str(tmp_path), "34/0")
    assert (game.seed, game.index, game.prompt.columns) == (sample_seed(3, 34), 0, {"answer": "2"})
    assert [each.said.text for each in turns] == ["7"]


def test_messages_of_the_assistant_that_the_environment_wrote_are_not_the_models(tmp_path):
    recorded(tmp_path, turn("an example"), turn("7"), replies=[[2]])
    assert [each.said.text for each in of_record(str(tmp_path), "34/0")[1]] == ["7"]


def test_calls_are_made_again_as_they_were(tmp_path):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    broken = {"type": "function", "function": {"name": "add", "arguments": "{a"}}
    recorded(tmp_path, turn("so", call, broken))
    ((one,),) = [of_record(str(tmp_path), "34/0")[1]]
    assert [(each.name, each.arguments, each.id) for each in one.said.tool_calls] == [
        ("add", {"a": 1}, "c1"),
        ("add", "{a", None),
    ]
    assert one.line == 'so\n/add {"a": 1}\n/add {a'


def test_an_environment_that_answers_as_it_did_plays_to_the_same_end(tmp_path):
    first = again(_guessed(tmp_path / "first", "?"))
    *_, answer = [line for line in first.output.splitlines() if line.startswith("user  ")]
    result = again(_guessed(tmp_path / "second", answer.removeprefix("user  ")))
    assert result.exit_code == 0, result.output
    assert "assistant  0" in result.output and "in the run it said" not in result.output


async def goes_on(episode: Episode, *, begins: str = "Guess.", ids: list[int] | None = None, text: str | None = None):
    """Asks with the text `begins`, and again with `text`, or with the ids of its context and `ids`."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key) as client:
        ask = partial(client.completions.create, model="any", extra_body={"return_token_ids": True})
        (first,) = (await ask(prompt=begins)).choices
        told: Any = first.model_extra
        await ask(prompt=text or [*told["prompt_token_ids"], *told["token_ids"], *(ids or ())])


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"ids": [4]}, None),
        ({"ids": [5]}, "On."),
        ({"text": "Guess.aOn."}, None),
        ({"text": "Guess.aOff."}, "On."),
        ({"begins": "Guess!", "ids": [4]}, "Guess."),
    ],
)
def test_the_raw_prompts_of_an_agent_are_compared_and_it_gets_the_recorded_ids(tmp_path, params, said):
    """The record: the ids 1 and 2, of which the turn 3, then the written 4 and the turn 5."""
    turns = [{"start": at, "end": at + 1, "finish_reason": "stop"} for at in (0, 2)]
    messages = (turn("a"), {"role": "user", "content": "On."}, turn("b"))
    agent = "tests.unit.deploy.test_playing_again:goes_on"
    recorded(tmp_path, *messages, environment=agent, params=params, turns=turns, replies=[[1, 3]])
    result = again(tmp_path)
    assert result.exit_code == (said is not None), result.output
    assert said is None or f"  in the run it said: {said}\n" in result.output


def test_an_environment_gets_the_facts_of_its_recorded_turns(tmp_path):
    """After a prompt of two tokens, three turns of one token."""
    reasons = ["stop", "length", "stop"]
    turns = [{"start": at, "end": at + 1, "finish_reason": reason} for at, reason in enumerate(reasons)]
    told = [{"role": "user", "content": text} for text in ("'Obs', stop, 1, 3", "'', length, 1, 4")]
    recorded(
        tmp_path,
        *(turn("see Obs"), told[0], turn("a"), told[1], turn("b")),
        environment="tells_turns",
        turns=turns,
        replies=[[1, 3, 5]],
        endings=[["Obs", "", ""]],
    )
    result = again(tmp_path)
    assert result.exit_code == 0, result.output


def test_where_it_answers_otherwise_the_old_answer_stands_beside_the_new_one(tmp_path):
    result = again(_guessed(tmp_path, "colder"))
    assert result.exit_code == 1 and "  in the run it said: colder" in result.output
    assert "answers that differ from the run's: 1" in result.output


def test_an_old_answer_does_nothing_to_the_terminal(tmp_path):
    assert "  in the run it said: colder\n" in again(_guessed(tmp_path, "col\x1b]0;owned\x07der")).output


@pytest.mark.parametrize(("number", "exit_code"), [(7, 0), (8, 1)])
def test_a_context_that_it_writes_otherwise_than_in_the_run_is_told(tmp_path, number, exit_code):
    note = {"role": "user", "content": f"The note says {number}."}
    second = [ASKED, note, turn("b"), {"role": "user", "content": "And?"}, turn("c")]
    recorded(tmp_path, turn("a"), environment="with_all_events", rewritten=second)
    result = again(tmp_path)
    assert result.exit_code == exit_code, result.output
    assert ("  in the run it said: Guess. | The note says 8." in result.output) == (number == 8)


def test_an_episode_that_ended_before_its_first_turn_has_none_to_play_again(tmp_path):
    """It was a traceback: the record names no messages of the model."""
    recorded(tmp_path, replies=[])
    assert of_record(str(tmp_path), "34/0")[1] == []


def test_an_environment_that_ends_before_the_run_did_is_told(tmp_path):
    secret = Random(sample_seed(3, 34)).randint(1, 20)
    recorded(tmp_path, turn(str(secret)), {"role": "user", "content": "lower"}, turn("1"), turn("2"))
    result = again(tmp_path)
    assert result.exit_code == 1 and "  turns of the run that it does not ask for any more: 2" in result.output


def test_an_environment_that_goes_on_after_the_end_that_it_had_in_the_run_is_told(tmp_path):
    recorded(tmp_path, turn("0"))
    result = again(tmp_path)
    assert result.exit_code == 1 and "  in the run the environment ended the episode here" in result.output


def _guessed(folder: Path, answer: str) -> Path:
    """An episode of two turns that a limit ended."""
    recorded(folder, turn("0"), {"role": "user", "content": answer}, turn("0"), finish_reason="length")
    return folder


@pytest.mark.parametrize(
    ("episode", "words", "says"),
    [
        ("34", (), "not of the form GROUP/SAMPLE"),
        ("35/0", (), "recorded no group 35"),
        ("34/7", (), "group 34 has samples 0 to 1"),
        ("34/1", (), "is a single turn"),
        ("34/0", ("--say", "7"), "leave everything but the run directory out"),
    ],
)
def test_what_cannot_be_played_again_is_said(tmp_path, episode, words, says):
    recorded(tmp_path, turn("7"))
    refused = again(tmp_path, *words, episode=episode)
    assert refused.exit_code == 2 and says in refused.output

"""Episodes from ticket to rows: real environments in real processes, and an engine that says what the test wants."""

import asyncio
import contextlib
import copy
import dataclasses
import json
import os
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from actors.chat.formatter import ChatFormatter
from actors.rollout.episodes.episodes import Episodes
from actors.rollout.episodes.group import _died
from actors.rollout.episodes.play import Play, task_of
from actors.rollout.worker import RolloutWorker
from cluster.contracts.config import RunConfig
from cluster.contracts.environment_config import EpisodesConfig
from cluster.contracts.episodes import Asked, EpisodeEnd
from cluster.contracts.errors import ConfigError, EpisodeOver, Limit
from cluster.contracts.sampling_config import SamplingConfig
from cluster.contracts.types import Prompt, Refusal, RewardStatus, Ticket, sample_seed
from cluster.weights.attestation import Attestor
from tests.models import make_tokenizer
from tests.unit.actors.chat.families import tokenizer_of
from tests.unit.actors.environments.test_failures import until
from tests.unit.actors.rollout.conversations import HERE, SpeakingEngine, UnfinishedEngine, number_of_turns
from tests.unit.actors.rollout.test_worker import weights

TOKENIZER = tokenizer_of("qwen25")
THINKING = tokenizer_of("qwen3")
END = TOKENIZER.eos_token_id


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """No process counts as blocked because the machine stands still for a while."""
    monkeypatch.setattr("actors.environments.host.process._BLOCKED_S", 120.0)


def config_of(environment: str | dict | None = None, **settings) -> RunConfig:
    played = {} if environment is None else {"environment": environment}
    if environment is not None:
        settings["episodes"] = {"cleanup_s": 120, **settings.get("episodes", {})}
    return RunConfig.model_validate({"model": {"path": "m"}, "prompts": "p", **played, **settings})


@contextlib.asynccontextmanager
async def worker_of(
    engine: SpeakingEngine, config: RunConfig, *, max_context: int = 512, tokenizer=TOKENIZER
) -> AsyncIterator[RolloutWorker]:
    formatter = ChatFormatter(tokenizer, max_context=max_context)
    worker = RolloutWorker(
        name="w0",
        run_id="run",
        make_engine=lambda: engine,
        formatter=formatter,
        attestor=Attestor(worker="w0", dtype="float32"),
        episodes=Episodes(config, formatter) if config.has_episodes else None,
        environment_of=config.environment_of,
    )
    await worker.warm_up()
    await worker.load(*weights(4))
    try:
        yield worker
    finally:
        worker.stop()
        await worker.close()


def ticket(
    index: int = 0, *, text: str = "play", num: int = 1, extra: int = 0, max_tokens: int = 8, **columns
) -> Ticket:
    messages = [{"role": "user", "content": text}]
    return Ticket(
        index=index,
        prompt=Prompt(prompt_id=f"p{index}", messages=messages, columns=columns),
        num_trajectories=num,
        num_extra_trajectories=extra,
        seed=100 + index,
        policy_version=0,
        sampling=SamplingConfig(max_tokens=max_tokens),
    )


def counting() -> SpeakingEngine:
    """Says how many turns it has had with this one."""
    return SpeakingEngine(TOKENIZER, lambda prompt: f"turn {number_of_turns(prompt)}")


async def collected(worker: RolloutWorker, *tickets: Ticket):
    return [each async for each in worker.generate(tickets)]


async def rows_of(environment, *tickets: Ticket, engine: SpeakingEngine | None = None, max_context=512, **settings):
    config = config_of(environment if isinstance(environment, dict) else f"{HERE}:{environment}", **settings)
    async with worker_of(engine or counting(), config, max_context=max_context) as worker:
        (batch,) = await collected(worker, *(tickets or [ticket()]))
    return batch.to_pylist()


async def test_two_turns_are_one_row_whose_sampled_tokens_alone_are_trained():
    engine = counting()
    (row,) = await rows_of("two_turns", engine=engine)
    first, second = engine.added
    assert engine.prompts()[1] == (
        f"{engine.prompts()[0]}turn 1<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    )
    said = [[*TOKENIZER(text, add_special_tokens=False).input_ids, END] for text in ("turn 1", "turn 2")]
    written = second.prompt_token_ids[len(first.prompt_token_ids) + len(said[0]) :]
    assert row["prompt_token_ids"] == first.prompt_token_ids
    assert row["completion_token_ids"] == [*said[0], *written, *said[1]]
    assert second.prompt_token_ids == [*first.prompt_token_ids, *said[0], *written]
    assert row["loss_mask"] == [*[True] * len(said[0]), *[False] * len(written), *[True] * len(said[1])]
    assert row["rollout_logprobs"] == [-4.0 * is_sampled for is_sampled in row["loss_mask"]]
    assert row["policy_versions"] == [4] * len(row["loss_mask"])
    start = len(said[0]) + len(written)
    assert row["turns"] == [
        {"start": 0, "end": len(said[0]), "finish_reason": "stop"},
        {"start": start, "end": start + len(said[1]), "finish_reason": "stop"},
    ]
    assert (row["environment"], row["segment_index"], row["num_segments"]) == ("two_turns", 0, 1)
    assert (row["reward"], row["reward_status"], row["token_rewards"]) == (0.5, "ok", None)
    assert row["reward_components"] == [("environment", 0.5)]
    assert json.loads(row["messages"]) == [
        {"role": "user", "content": "play"},
        {"role": "assistant", "content": "turn 1"},
        {"role": "user", "content": "go on"},
        {"role": "assistant", "content": "turn 2"},
    ]
    told = json.loads(row["episode"])
    assert (told["log"], told["num_calls"], told["num_malformed_calls"]) == ({"first": "turn 1"}, 0, 0)
    assert (told["num_written_tokens"], told["num_retries"]) == ({"user": len(written)}, 0)
    assert (told["replies"], told["endings"]) == ([[1, 3]], [["", ""]])
    assert row["model_seconds"] > 0.0


@pytest.mark.parametrize("deterministic", [False, True])
async def test_an_agent_that_writes_the_chat_template_itself_has_the_rows_of_one_that_converses(deterministic):
    (chat,) = await rows_of("two_turns")
    between = "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    written = {"name": f"{HERE}:two_raw_turns", "prompt": chat["prompt_text"], "between": between}
    rows = await rows_of(written, ticket(num=2), deterministic=deterministic)
    same = [
        name for name in chat if name not in ("environment", "messages", "model_seconds", "started_at", "finished_at")
    ]
    assert {name: rows[0][name] for name in same} == {name: chat[name] for name in same}
    assert [message["content"] for message in json.loads(rows[1]["messages"])] == [
        chat["prompt_text"],
        "turn 1",
        between.removeprefix("<|im_end|>"),
        "turn 2",
    ]


async def test_each_turn_of_each_sample_has_a_seed_of_its_own_and_its_groups_place():
    engine = counting()
    await rows_of("two_turns", ticket(7, num=2), engine=engine)
    assert {request.request_id: (request.seed, request.place) for request in engine.added} == {
        f"00000007.1/{index}.1.{turn}": (sample_seed(sample_seed(107, index), turn), 7)
        for index in (0, 1)
        for turn in (0, 1)
    }


async def test_single_turns_of_a_run_with_environments_are_sampled_as_in_one_without():
    both = {"plain": "single_turn", "game": f"{HERE}:two_turns"}
    batches = []
    for config in (config_of(environments=both), config_of()):
        async with worker_of(counting(), config) as worker:
            (batch,) = await collected(worker, ticket(num=2, environment="plain"))
            batches.append(batch.drop_columns(["started_at", "finished_at", "environment"]))
    assert batches[0].equals(batches[1])


async def test_environments_are_chosen_by_the_prompts_column_and_an_unknown_one_costs_its_group():
    both = {"plain": "single_turn", "game": f"{HERE}:two_turns"}
    async with worker_of(counting(), config_of(environments=both)) as worker:
        tickets = [ticket(index, environment=name) for index, name in enumerate(("plain", "game", "gone"))]
        results = await collected(worker, *tickets)
    refused = next(each for each in results if isinstance(each, Refusal))
    assert refused.reason == "environments has no entry for 'gone' (column 'environment'); it has: plain, game"
    rows = [each.to_pylist()[0] for each in results if not isinstance(each, Refusal)]
    assert {row["group_id"]: row["environment"] for row in rows} == {"00000000": "plain", "00000001": "game"}


@pytest.mark.parametrize(("environment", "prompt"), [("greeting", "go on"), ("dead_on_arrival", "Hi")])
async def test_a_system_message_alone_is_a_prompt_also_where_the_template_wants_a_users(environment, prompt):
    """Gymnasium's prompts were refused by the template of Qwen3.5, though the first ask adds the observation."""
    tokenizer, asked = copy.deepcopy(TOKENIZER), ticket()
    wants_user = "{% if messages | selectattr('role', 'equalto', 'user') | list == [] %}{{ raise_exception('no user') }}{% endif %}"
    tokenizer.chat_template = wants_user + TOKENIZER.chat_template
    rules = dataclasses.replace(asked.prompt, messages=[{"role": "system", "content": "rules"}])
    async with worker_of(counting(), config_of(f"{HERE}:{environment}"), tokenizer=tokenizer) as worker:
        (batch,) = await collected(worker, dataclasses.replace(asked, prompt=rules))
    (row,) = batch.to_pylist()
    assert f"<|im_start|>user\n{prompt}<|im_end|>" in row["prompt_text"]


async def test_rewards_along_the_way_stand_at_the_last_token_of_their_turn():
    (row,) = await rows_of("earning")
    ends = [turn["end"] - 1 for turn in row["turns"]]
    assert [row["token_rewards"][end] for end in ends] == [0.25, 0.5]
    assert sum(row["token_rewards"]) == 0.75
    assert dict(row["reward_components"]) == {"earned/step": 0.25, "environment": 1.0}


async def test_an_episode_that_earned_nothing_of_what_others_earned_has_zero_of_it():
    rows = await rows_of("earning_once", ticket(num=2))
    assert [dict(row["reward_components"])["earned/first"] for row in rows] == [1.0, 0.0]
    assert [row["token_rewards"] is None for row in rows] == [False, True]


async def test_a_rewritten_history_begins_a_segment_of_the_same_episode():
    first, second = await rows_of("rewriting")
    assert [(row["segment_index"], row["num_segments"], row["sample_index"]) for row in (first, second)] == [
        (0, 2, 0),
        (1, 2, 0),
    ]
    assert "note: turn 1" in second["prompt_text"] and "play" not in second["prompt_text"]
    assert [row["reward"] for row in (first, second)] == [1.0, 1.0]
    assert [sum(row["token_rewards"]) for row in (first, second)] == [0.25, 0.0]
    assert json.loads(second["messages"])[0] == {"role": "user", "content": "note: turn 1"}
    assert all(second["loss_mask"])


async def test_at_its_last_turn_an_episode_ends_as_length_with_nothing_for_the_rest():
    (row,) = await rows_of("endless", episodes={"max_turns": 3})
    assert (row["finish_reason"], row["reward"], row["reward_status"]) == ("length", 0.0, "ok")
    assert len(row["turns"]) == 3


async def test_at_its_last_turn_an_episode_of_several_segments_ends_as_length_in_the_last():
    """The learner takes the end of an episode from there."""
    rows = await rows_of("forgetting", episodes={"max_turns": 2})
    assert [row["finish_reason"] for row in rows] == ["stop", "length"]


async def test_at_the_end_of_its_context_an_episode_ends_as_length():
    (row,) = await rows_of("endless", max_context=96)
    assert (row["finish_reason"], row["reward"]) == ("length", 0.0)
    assert len(row["prompt_token_ids"]) + len(row["completion_token_ids"]) < 96


@pytest.mark.parametrize("on_turn_length, num_turns", [("end", 1), ("continue", 2)])
async def test_a_turn_that_was_cut_off_is_the_last_one_unless_the_run_says_otherwise(on_turn_length, num_turns):
    (row,) = await rows_of("two_turns", ticket(max_tokens=2), episodes={"on_turn_length": on_turn_length})
    assert len(row["turns"]) == num_turns and row["turns"][0]["finish_reason"] == "length"
    assert row["reward"] == (0.0 if on_turn_length == "end" else 0.5)
    assert row["finish_reason"] == "length"


async def test_no_more_episodes_are_under_way_than_the_run_says():
    """Seen in review: a worker takes whole groups, and all episodes of one began at once, more than a server has sessions for."""
    engine = counting()
    rows = await rows_of("two_turns", ticket(num=3), engine=engine, episodes={"max_concurrent": 1})
    assert [row["reward"] for row in rows] == [0.5] * 3
    turns = [request.request_id.rpartition("/")[2] for request in engine.added]
    assert turns == ["0.1.0", "0.1.1", "1.1.0", "1.1.1", "2.1.0", "2.1.1"]


async def test_a_failed_episode_has_a_status_and_a_stage_and_no_reward():
    failed, good = await rows_of("failing", ticket(num=2))
    assert (failed["reward"], failed["reward_status"], failed["failed_stage"]) == (None, "error", "environment")
    assert failed["reward_message"] == "RuntimeError: the game broke"
    assert (good["reward"], good["failed_stage"]) == (1.0, None)


async def test_an_episode_that_fails_before_its_first_token_completes_its_group():
    (row,) = await rows_of("dead_on_arrival")
    assert row["completion_token_ids"] == [] and row["prompt_token_ids"]
    assert (row["reward_status"], row["reward_message"]) == ("error", "RuntimeError: no game today")


async def test_an_environment_that_never_asks_has_failed():
    (row,) = await rows_of("unasked")
    assert (row["reward_status"], row["reward_message"]) == ("error", "it never asked the model")


async def test_without_a_reward_of_its_own_an_episode_is_for_the_judges():
    (row,) = await rows_of("judged")
    assert (row["reward"], row["reward_status"], row["reward_components"]) == (None, None, [])


async def test_turns_are_held_against_what_the_template_writes_of_the_whole_conversation():
    """The second prompt differs where the model split its words otherwise: here each letter is a token of its own."""
    letters = [TOKENIZER.convert_tokens_to_ids(letter) for letter in "the"]
    for split, num_uncanonical in ((False, 0), (True, 1)):
        engine = SpeakingEngine(TOKENIZER, lambda prompt: "the", token_ids=letters if split else None)
        (row,) = await rows_of("two_turns", engine=engine, episodes={"compared_share": 1.0})
        assert json.loads(row["episode"])["num_uncanonical_turns"] == num_uncanonical
    (row,) = await rows_of("two_turns", episodes={"compared_share": 0.0})
    assert json.loads(row["episode"])["num_uncanonical_turns"] is None


@pytest.mark.parametrize(("history", "num_segments"), [("append", 1), ("template", 2)])
async def test_where_the_template_drops_earlier_reasoning_history_is_kept_or_written_anew(history, num_segments):
    engine = SpeakingEngine(THINKING, lambda prompt: "<think>\nhm\n</think>\n\nyes")
    config = config_of(f"{HERE}:two_turns", episodes={"history": history})
    async with worker_of(engine, config, tokenizer=THINKING) as worker:
        (batch,) = await collected(worker, ticket(max_tokens=40))
    assert batch.num_rows == num_segments
    shown = engine.prompts()[1]
    assert ("hm" in shown) is (history == "append")
    assert "yes<|im_end|>" in shown
    assert batch["num_segments"].to_pylist() == [num_segments] * num_segments
    assert batch["reward"].to_pylist() == [0.5] * num_segments


async def test_calls_are_answered_and_counted_and_those_that_cannot_be_read_go_back():
    written = [
        '<tool_call>\n{"name": "double", "arguments": {"number": 21}}\n</tool_call>',
        '<tool_call>\n{"name": "double", "arguments": {"numb\n</tool_call>',
        "It is 42.",
    ]
    replies: dict[int, str] = dict(enumerate(written, 1))
    engine = SpeakingEngine(TOKENIZER, lambda prompt: replies[number_of_turns(prompt)])
    (row,) = await rows_of("with_tools", ticket(max_tokens=80), engine=engine)
    _, called, answer, broken, refusal, last = json.loads(row["messages"])
    assert called["tool_calls"][0]["function"] == {"name": "double", "arguments": {"number": 21}}
    assert (answer["role"], answer["content"], answer["tool_call_id"]) == ("tool", "42", "call00000")
    assert isinstance(broken["tool_calls"][0]["function"]["arguments"], str)
    assert refusal["content"].startswith("error: the arguments of double must be a JSON object")
    assert last == {"role": "assistant", "content": "It is 42."}
    told = json.loads(row["episode"])
    assert told["num_malformed_calls"] == 1 and row["reward"] == 2.0
    assert told["num_written_tokens"] == {"tool": row["loss_mask"].count(False)}
    assert "double" in row["prompt_text"]


async def test_the_record_has_the_tools_of_each_segment_as_its_prompt_shows_them():
    """Seen before: examples for fine-tuning had calls of tools that they did not show."""
    rows = await rows_of("with_two_tools_then_one")
    tools = json.loads(rows[0]["episode"])["tools"]
    assert [[each["function"]["name"] for each in shown] for shown in tools] == [["half", "double"], ["double"]]
    write = ChatFormatter(TOKENIZER, max_context=512).turns().first_prompt
    for row, shown in zip(rows, tools, strict=True):
        assert write(json.loads(row["messages"])[:1], tools=shown)[0] == row["prompt_text"]


@pytest.mark.parametrize(("environment", "tools"), [("rewriting", [[]]), ("dead_on_arrival", [])])
async def test_equal_tools_of_all_segments_are_recorded_once(environment, tools):
    assert json.loads((await rows_of(environment))[0]["episode"])["tools"] == tools


async def test_a_prompt_that_ends_its_environments_process_is_refused_and_the_others_begin_anew():
    async with worker_of(counting(), config_of(f"{HERE}:killing")) as worker:
        bad, good = ticket(0, text="die"), ticket(1, num=2)
        results = {each.group_id if isinstance(each, Refusal) else "good": each for each in await collected(worker, bad, good)}  # fmt: skip
    assert (
        "ends the process of its environment, alone in it, too: its process ended: exit code 3"
        in results["00000000"].reason
    )
    assert results["good"]["reward"].to_pylist() == [1.0, 1.0]


async def test_an_episode_whose_process_died_once_begins_anew(tmp_path):
    environment = {"name": f"{HERE}:dying_once", "file": str(tmp_path / "died")}
    engine = counting()
    (row,) = await rows_of(environment, engine=engine)
    assert (row["reward"], row["reward_status"], len(row["turns"])) == (1.0, "ok", 1)
    assert json.loads(row["episode"])["num_retries"] == 1
    turns = [request.request_id.rpartition("/")[2] for request in engine.added]
    assert turns == ["0.1.0", "0.2.0"], "the engine may still answer a turn of the first try"


def test_an_episode_that_met_its_deadline_is_not_tried_again_although_it_blocked_its_process():
    """Its prompt would be refused for good."""
    late = EpisodeEnd(status=RewardStatus.TIMEOUT, failed_stage="environment", message="late", is_suspect=True)
    assert not _died(late) and _died(dataclasses.replace(late, status=RewardStatus.ERROR))


async def test_surplus_episodes_are_cancelled_and_clean_up(tmp_path):
    environment = {"name": f"{HERE}:tidying", "folder": str(tmp_path)}
    async with worker_of(counting(), config_of(environment)) as worker:
        running = asyncio.create_task(collected(worker, ticket(num=3)))
        await until(lambda: worker.progress().detail == "1 groups" and not worker._engine._active)
        await until(lambda: len([*tmp_path.iterdir()]) == 3)
        assert await worker.abort(["00000000"]) == ["00000000"]
        assert await running == []
        await until(lambda: {path.read_text() for path in tmp_path.iterdir()} == {"tidied"})


async def test_synchronous_environments_have_processes_of_their_own():
    rows = await rows_of("blocking", ticket(num=3), episodes={"max_processes": 2})
    assert [row["reward"] for row in rows] == [1.0] * 3
    pids = {json.loads(row["episode"])["log"]["pid"] for row in rows}
    assert 1 <= len(pids) <= 2 and os.getpid() not in pids


@pytest.mark.parametrize("environment", [{"name": f"{HERE}:at_odd_moments"}, f"{HERE}:blocking"])
async def test_a_deterministic_run_computes_the_same_turns_together_however_slow_environments_are(environment):
    compositions = []
    for slow in (1, 2):
        own = {**environment, "slow": slow} if isinstance(environment, dict) else environment
        engine = counting()
        config = config_of(own, deterministic=True, episodes={"max_processes": 2})
        async with worker_of(engine, config) as worker:
            await collected(worker, ticket(0, num=3), ticket(1, num=2))
        compositions.append([sorted(each) for each in engine.compositions if each])
    assert compositions[0] == compositions[1]


@pytest.mark.parametrize("deterministic", [False, True])
async def test_a_death_that_costs_more_episodes_than_there_are_processes_costs_none(tmp_path, deterministic):
    environment = {"name": f"{HERE}:dying_together", "file": str(tmp_path / "died"), "num": 7}
    rows = await rows_of(environment, ticket(num=7), deterministic=deterministic, episodes={"timeout_s": 240})
    assert [row["reward"] for row in rows] == [1.0] * 7
    assert [json.loads(row["episode"])["num_retries"] for row in rows] == [1] * 7


async def test_in_rounds_two_calls_follow_one_another():
    """Synchronous episodes of both would wait for each other's processes."""
    config = config_of(f"{HERE}:blocking", deterministic=True, episodes={"max_processes": 2, "timeout_s": 240})
    async with worker_of(counting(), config) as worker:
        both = await asyncio.gather(*(collected(worker, ticket(index, num=3)) for index in (0, 1)))
    assert [batch["reward"].to_pylist() for (batch,) in both] == [[1.0] * 3] * 2


async def test_a_turn_that_the_environment_gave_up_is_in_no_row_and_earns_nothing():
    engine = UnfinishedEngine(TOKENIZER, lambda prompt: "x" * (1 if number_of_turns(prompt) == 1 else 400))
    (row,) = await rows_of("giving_up", ticket(max_tokens=400), engine=engine, max_context=1024)
    (turn,) = row["turns"]
    assert len(row["completion_token_ids"]) == turn["end"]
    assert row["token_rewards"] == [*[0.0] * (turn["end"] - 1), 1.0]
    assert [each["role"] for each in json.loads(row["messages"])] == ["user", "assistant"]
    assert engine._running == {}, "nobody samples it any more"


@pytest.mark.parametrize("what", ["log", "earn", "raise", "return"])
async def test_half_characters_of_an_environment_are_written_as_question_marks(what):
    (row,) = await rows_of({"name": f"{HERE}:bad_words", "what": what})
    told = [row["reward_message"] or "", row["episode"], *(name for name, _ in row["reward_components"])]
    assert "?" in "".join(told)


async def test_half_characters_in_a_call_of_the_model_are_written_as_question_marks():
    said = {1: '<tool_call>\n{"name": "double", "arguments": {"number": "\\ud83d"}}\n</tool_call>', 2: "done"}
    engine = SpeakingEngine(TOKENIZER, lambda prompt: said[number_of_turns(prompt)])
    (row,) = await rows_of("with_tools", ticket(max_tokens=80), engine=engine)
    _, called, *_ = json.loads(row["messages"])
    assert called["tool_calls"][0]["function"]["arguments"] == {"number": "?"}


async def test_half_characters_in_the_refusal_of_a_tool_are_written_as_question_marks():
    said = {1: '<tool_call>\n{"name": "find", "arguments": {"page": "one"}}\n</tool_call>', 2: "done"}
    engine = SpeakingEngine(TOKENIZER, lambda prompt: said[number_of_turns(prompt)])
    (row,) = await rows_of("with_a_tool_that_refuses", ticket(max_tokens=80), engine=engine)
    assert json.loads(row["messages"])[2]["content"] == "error: no page ?, but one"


async def test_tools_that_the_prompt_does_not_show_are_refused():
    (row,) = await rows_of("late_tools")
    assert "these tools were not given from the first ask on" in row["reward_message"]


def test_an_episode_keeps_its_id_when_it_is_tried_again_and_has_another_at_each_evaluation():
    """Seen in review: held-out prompts had one id at all evaluations, so what an id guards happened at the first one alone."""

    def id_at(version: int, *, index: int) -> str:
        nothing: Any = None
        one = dataclasses.replace(ticket(index), policy_version=version)
        return Play(one, 1, key="k", opening=nothing, speech=nothing, config=EpisodesConfig()).task.id

    assert id_at(0, index=3) == id_at(20, index=3) == "00000003/1"
    assert (id_at(0, index=-1), id_at(20, index=-1)) == ("-0000001/1/0", "-0000001/1/20")


@pytest.mark.parametrize(("length", "is_elsewhere"), [(10, False), (100_000, True)])
async def test_long_answers_are_encoded_beside_the_event_loop(length, is_elsewhere):
    """A worker that encoded an answer of four megabytes sent no heartbeat for over a minute, and was replaced."""
    nothing: Any = None
    play = Play(ticket(), 0, key="k", opening=nothing, speech=nothing, config=EpisodesConfig())
    threads = []

    def prompt_for(_: Asked):
        threads.append(threading.current_thread())
        raise EpisodeOver("full", limit=Limit.CONTEXT)

    play._transcript.prompt_for = prompt_for
    with pytest.raises(EpisodeOver):
        await play.converse(Asked(messages=({"role": "user", "content": "x" * length},)))
    assert [each is not threading.current_thread() for each in threads] == [is_elsewhere]


def test_the_text_of_a_task_is_its_prompts_or_that_of_the_last_message():
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "play"}
    prompts = (Prompt(prompt_id="p", messages=[system, user]), Prompt(prompt_id="p", text="go"))
    rest = {"id": "0/0", "seed": 1, "index": 0, "sampling": SamplingConfig()}
    assert [task_of(prompt, **rest).prompt for prompt in prompts] == ["play", "go"]


async def test_a_stop_text_is_one_text():
    engine = counting()
    await rows_of("asking_wrongly", engine=engine)
    assert engine.added[0].sampling.stop == ("END",)


@pytest.mark.parametrize(("asked", "most", "fewest"), [(3, 3, 3), (9, 8, 5)])
async def test_a_turn_has_the_limits_of_the_run_and_narrower_ones_of_its_own(asked, most, fewest):
    engine = counting()
    of_the_run = SamplingConfig(max_tokens=8, min_tokens=5, stop=("OVER",))
    environment = {"name": f"{HERE}:asking_wrongly", "max_tokens": asked}
    await rows_of(environment, dataclasses.replace(ticket(), sampling=of_the_run), engine=engine)
    (sampling,) = [request.sampling for request in engine.added]
    assert (sampling.max_tokens, sampling.min_tokens, sampling.stop) == (most, fewest, ("OVER", "END"))


@pytest.mark.parametrize(
    ("wrong", "said"), [({"max_tokens": 0}, "a whole number of at least 1"), ({"stop": ""}, "an empty one would end")]
)
async def test_limits_that_no_turn_can_have_are_the_environments_mistake(wrong, said):
    (row,) = await rows_of({"name": f"{HERE}:asking_wrongly", **wrong})
    assert row["failed_stage"] == "environment" and said in row["reward_message"]


async def test_messages_beyond_the_whole_context_are_the_environments_failure_and_no_zero():
    (row,) = await rows_of("flooding")
    assert (row["reward"], row["reward_status"]) == (None, "error")
    assert "and the context takes 512; shorten them" in row["reward_message"]


@pytest.mark.parametrize("environment", ["mostly_failing", "mostly_unasked"])
async def test_surplus_episodes_take_the_places_of_failed_ones(environment):
    rows = await rows_of(environment, ticket(num=3, extra=2))
    assert [(row["sample_index"], row["reward"]) for row in rows] == [(2, 1.0), (3, 1.0), (4, 1.0)]


async def test_a_deterministic_run_mixes_no_single_turns_with_episodes():
    both = {"plain": "single_turn", "game": f"{HERE}:two_turns"}
    with pytest.raises(ValueError, match="deterministic=true with single turns and environments"):
        config_of(environments=both, deterministic=True)


async def test_a_model_without_a_chat_template_cannot_converse():
    with pytest.raises(ConfigError, match="the model has no chat template"):
        Episodes(config_of("guess"), ChatFormatter(make_tokenizer(), max_context=64))


async def test_a_prompt_that_is_a_plain_text_is_refused():
    async with worker_of(counting(), config_of(f"{HERE}:two_turns")) as worker:
        plain = dataclasses.replace(ticket(), prompt=Prompt(prompt_id="p", text="hi"))
        (refused,) = await collected(worker, plain)
    assert refused.reason.startswith("prompt 'p' is a text without roles")


async def test_what_is_sampled_of_episodes_is_not_handed_over():
    engine = UnfinishedEngine(TOKENIZER, lambda prompt: "x" * 8)
    async with worker_of(engine, config_of(f"{HERE}:two_turns")) as worker:
        running = asyncio.create_task(collected(worker, ticket(max_tokens=20)))
        await until(lambda: len(engine.added) == 2)
        assert await worker.hand_over(["00000000"]) == [None]
        assert await running == []
        await until(lambda: engine._running == {})

"""Cost of episodes in addition to sampling: turns/s of a worker against a bare loop over its engine, and milliseconds a turn of its parts.

A random model of hidden size 256, one thread on each side, turns of at most 16 tokens. The environment says a short text
that differs from turn to turn and from episode to episode; what repeats is the template's alone.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from actors.chat.formatter import ChatFormatter
from actors.environments.host.hosting import EnvironmentHost
from actors.processes.printed import PrintedLines
from actors.rollout.episodes.play import Play
from actors.rollout.episodes.speech import Opening, Speech
from actors.rollout.vllm_engine import VllmEngine
from actors.rollout.worker import RolloutWorker
from cluster.contracts.config import RunConfig
from cluster.contracts.environment_config import EpisodesConfig
from cluster.contracts.episodes import Asked, EpisodeTask, Said
from cluster.contracts.plugins import Plugin
from cluster.contracts.protocols import EngineRequest
from cluster.contracts.sampling_config import SamplingConfig
from cluster.contracts.types import Completion, FinishReason, Prompt, Refusal, Ticket, sample_seed
from tests.benchmarks._conversations import told
from tests.benchmarks.sampling import published
from tests.integration.conversations import TEMPLATE
from tests.models import make_tiny_model
from tests.unit.actors.chat.families import tokenizer_of

ENVIRONMENT = "tests.benchmarks._conversations:chat"
TURNS, MAX_TOKENS = 4, 16
NUM_GROUPS, GROUP_SIZE = 8, 8
MANY_GROUPS = 32
"""256 episodes."""
WAIT_S = 1.0
ROUNDS = 4
HOST_TURNS = {1: 200, 64: 20}
"""Of each episode, by the number of episodes at once."""
LONG_TURNS, LONG_PROMPT, LONG_SAMPLED, LONG_ADDED = 20, 2_000, 200, 100
"""Tokens, about 8,000 in the end."""
SAMPLING = SamplingConfig(max_tokens=MAX_TOKENS)


def rows() -> Iterator[dict[str, Any]]:
    """Rows as in `build/bench.json`. Rounds alternate, and each side's best counts: other work on the machine only slows."""
    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_model(Path(folder), hidden_size=256, chat_template=TEMPLATE)
        yield from asyncio.run(_host_alone())
        yield from asyncio.run(_models_side())
        yield from asyncio.run(_with_engine(path))


# The host alone


async def _host_alone() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for num_episodes, turns in HOST_TURNS.items():
        config = EpisodesConfig(max_turns=turns)
        environment = Plugin.model_validate({"name": ENVIRONMENT, "turns": turns})
        host = await EnvironmentHost.start(environment, config, printed=PrintedLines())
        tasks = [EpisodeTask(id=str(i), prompt="hi", messages=(), seed=i, index=i) for i in range(num_episodes)]
        seconds: list[float] = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            ends = await asyncio.gather(*(host.run(task, _answer_at_once) for task in tasks))
            seconds.append(time.perf_counter() - began)
            assert [end.reward for end in ends] == [1.0] * num_episodes
        await host.close()
        value = 1e3 * min(seconds) / (num_episodes * turns)
        found.append(
            {"name": f"episodes, host alone, {num_episodes} at once", "value": value, "unit": "ms/turn", "aim": "<= 3"}
        )
    return found


async def _answer_at_once(asked: Asked) -> Said:
    return Said(text="all is well, go on", num_tokens=6, num_context_tokens=100)


# The model's side alone


async def _models_side() -> list[dict[str, Any]]:
    """Templates, tokens and texts of a conversation that grows to 8,000 tokens, without engine and host."""
    tool = {
        "name": "look_up",
        "description": "Looks a name up.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    }
    tools = ({"type": "function", "function": tool},)
    kinds = {"words": ("user", ()), "tool calls": ("tool", tools)}
    return [
        {
            "name": f"episodes, model's side alone, {kind}, {LONG_TURNS} turns to 8,000 tokens",
            "value": 1e3 * min([await _long_conversation(role, tools=tools) for _ in range(ROUNDS)]) / LONG_TURNS,
            "unit": "ms/turn",
        }
        for kind, (role, tools) in kinds.items()
    ]


async def _long_conversation(role: str, *, tools: Any) -> float:
    """Seconds. The model writes a call in each turn where it has tools."""
    tokenizer = tokenizer_of("qwen25")
    formatter = ChatFormatter(tokenizer, max_context=20_000)
    speech = Speech(formatter)

    def words(num_tokens: int) -> str:
        return formatter.decode(tokenizer(" the tool found what the user asks" * num_tokens).input_ids[:num_tokens])

    call = (
        f"<tool_call>\n{json.dumps({'name': 'look_up', 'arguments': {'name': words(LONG_SAMPLED - 30)}})}\n</tool_call>"
    )
    said = [*tokenizer(call if tools else words(LONG_SAMPLED)).input_ids, tokenizer.eos_token_id]
    ticket = _ticket(0, words(LONG_PROMPT), size=1, sampling=SamplingConfig(max_tokens=2 * LONG_SAMPLED))

    async def sample(request: EngineRequest) -> Completion:
        num_tokens = len(said)
        return Completion(
            token_ids=[*said],
            rollout_logprobs=[-1.0] * num_tokens,
            policy_versions=[0] * num_tokens,
            finish_reason=FinishReason.STOP,
        )

    def begun() -> Play:
        opening, config = Opening(ticket.prompt, speech), EpisodesConfig(compared_share=0.0)
        play = Play(ticket, 0, key="key", opening=opening, speech=speech, config=config)
        play.sample = sample
        return play

    # A page of the web: `<` begins control tokens, too, so that such texts are looked at closely.
    text = f"<li>{words(LONG_ADDED)}</li>" if tools else words(LONG_ADDED)
    await begun().converse(Asked(tools=tools))  # what is made once for a model is made now
    play = begun()
    began = time.perf_counter()
    heard = await play.converse(Asked(tools=tools))
    for turn in range(1, LONG_TURNS):
        assert len(heard.tool_calls) == len(tools)
        message = {"role": role, "content": f"{turn} {text}"}
        if heard.tool_calls:
            message |= {"name": heard.tool_calls[0].name, "tool_call_id": heard.tool_calls[0].id}
        heard = await play.converse(Asked(messages=(message,), tools=tools))
    return time.perf_counter() - began


# Worker and engine


async def _with_engine(path: Path) -> list[dict[str, Any]]:
    # Before the first vLLM, which makes this function do nothing: the bare loop's thread would compute on all cores.
    torch.set_num_threads(1)
    assert torch.get_num_threads() == 1, "a bare loop on more threads than the worker's is no baseline"
    plain = await _worker(path, wait_s=0.0)
    bare = VllmEngine(_config(path, wait_s=0.0), formatter=_formatter(path), num_threads=1)
    ours, theirs = [], []
    for _ in range(ROUNDS):
        (ours_now, _, num_ours), (theirs_now, num_theirs) = (
            await _played(plain, NUM_GROUPS),
            _bare(bare, path, NUM_GROUPS),
        )
        # In other company a logit may differ in its last bit, and seldom a token.
        assert abs(num_ours - num_theirs) < 0.02 * num_theirs, (num_ours, num_theirs)
        ours.append(ours_now)
        theirs.append(theirs_now)
    at_once, busy_at_once, _ = await _played(plain, MANY_GROUPS)
    await _end(plain)
    waiting = await _worker(path, wait_s=WAIT_S)
    late, busy_late, _ = await _played(waiting, MANY_GROUPS)
    await _end(waiting)
    without = {"baseline": "the same episodes without waiting"}
    many = f"episodes, {MANY_GROUPS * GROUP_SIZE} that wait {WAIT_S:g} s between turns: "
    return [
        {
            "name": "episodes",
            "value": max(ours),
            "unit": "turns/s",
            "baseline": "a bare loop over the same engine, prompts extended by hand",
            "baseline_value": max(theirs),
            "ratio": max(ours) / max(theirs),
            "aim": ">= 0.85",
        },
        {"name": f"{many}turns/s", "value": late, "unit": "turns/s"}
        | without
        | {"baseline_value": at_once, "ratio": late / at_once},
        {"name": f"{many}engine busy", "value": busy_late, "unit": "share of time"}
        | without
        | {"baseline_value": busy_at_once, "ratio": busy_late / busy_at_once},
    ]


def _config(path: Path, *, wait_s: float) -> RunConfig:
    return RunConfig.model_validate(
        {
            "prompts": "file",
            "model": {"path": str(path), "dtype": "float32"},
            "rollout": {"kv_cache_bytes": 256 * 1024**2},
            "sampling": SAMPLING,
            "environment": {"name": ENVIRONMENT, "turns": TURNS, "wait_s": wait_s},
            "episodes": {"on_turn_length": "continue", "compared_share": 0.0},
        }
    )


def _formatter(path: Path) -> ChatFormatter:
    return ChatFormatter.load(_config(path, wait_s=0.0).model)


async def _worker(path: Path, *, wait_s: float) -> RolloutWorker:
    worker = RolloutWorker.with_vllm(_config(path, wait_s=wait_s), name="worker", run_id="bench", num_threads=1)
    await worker.warm_up()
    await worker.load(*published(path))
    await _played(worker, 1)
    return worker


async def _end(worker: RolloutWorker) -> None:
    worker.stop()
    await worker.close()


def _ticket(index: int, text: str, *, size: int, sampling: SamplingConfig) -> Ticket:
    messages = [{"role": "user", "content": text}]
    return Ticket(
        index=index,
        prompt=Prompt(prompt_id=str(index), messages=messages),
        num_trajectories=size,
        seed=index,
        policy_version=0,
        sampling=sampling,
    )


async def _played(worker: RolloutWorker, num_groups: int) -> tuple[float, float, int]:
    """Turns/s, the share of time in which the engine had requests, and the tokens sampled."""
    tickets = [_ticket(index, f"say {index}", size=GROUP_SIZE, sampling=SAMPLING) for index in range(num_groups)]
    start, began, num_turns, num_sampled = time.time(), time.perf_counter(), 0, 0
    async for batch in worker.generate(tickets):
        assert not isinstance(batch, Refusal), batch
        num_turns += len(batch["turns"].flatten())
        num_sampled += sum(batch["loss_mask"].flatten().to_pylist())
    seconds = time.perf_counter() - began
    assert num_turns == num_groups * GROUP_SIZE * TURNS
    sampling = sum(phase.seconds for phase in worker.timeline.after(start) if phase.name == "sampling")
    return num_turns / seconds, sampling / seconds, num_sampled


def _bare(engine: VllmEngine, path: Path, num_groups: int) -> tuple[float, int]:
    """Turns/s and the tokens sampled. The same turns: the same prompts at first, then each time what was sampled and what the template
    writes after it."""
    formatter = _formatter(path)
    encoder, eos = formatter.turns().encoder, formatter.stop_token_ids[-1]
    left: dict[str, tuple[list[int], int, int]] = {}
    """By request: its context, its episode's seed, and the turn that runs."""
    began, num_turns, num_sampled = time.perf_counter(), 0, 0

    def ask(episode: str, context: list[int], seed: int, turn: int) -> None:
        left[f"{episode}.{turn}"] = (context, seed, turn)
        engine.add(
            EngineRequest(
                request_id=f"{episode}.{turn}",
                prompt_token_ids=[*context],
                sampling=SAMPLING,
                seed=sample_seed(seed, turn),
                place=int(episode.partition("/")[0]),
            )
        )

    for group in range(num_groups):
        context = formatter.encode(_ticket(group, f"say {group}", size=1, sampling=SAMPLING).prompt).token_ids
        for sample in range(GROUP_SIZE):
            ask(f"{group}/{sample}", [*context], sample_seed(group, sample), 0)
    while left:
        for output in engine.step():
            context, seed, turn = left[output.request_id]
            context += output.token_ids
            num_sampled += len(output.token_ids)
            if output.finish_reason is None:
                continue
            num_turns += 1
            del left[output.request_id]
            if turn + 1 < TURNS:
                episode = output.request_id.partition(".")[0]
                group, index = map(int, episode.split("/"))
                following = encoder.encode(f"U:{told(seed=group, index=index, turn=turn + 1)}\nA:")
                context += following if output.finish_reason is FinishReason.STOP else [eos, *following]
                ask(episode, context, seed, turn + 1)
    return num_turns / (time.perf_counter() - began), num_sampled


if __name__ == "__main__":
    print(*rows(), sep="\n")

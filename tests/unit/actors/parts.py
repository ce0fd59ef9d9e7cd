"""Judges of each kind, and functions as other projects' documents write them."""

import asyncio
import os
import re
import time
from typing import Any


def length(completion: str) -> float:
    return float(len(completion))


async def shouting(messages: list[dict[str, Any]]) -> float:
    return float(messages[-1]["content"].isupper())


def rank(completions: list[str]) -> list[float]:
    """The place of each by its length, 0 the shortest."""
    order = sorted(completions, key=len)
    return [float(order.index(each)) for each in completions]


async def everything(prompts, completions, all_messages, all_token_ids, finish_reasons, seeds, columns, rewards):
    """True of each when all that a judge of groups is given is there."""
    await asyncio.sleep(0)
    assert [len(each) for each in (prompts, all_messages, finish_reasons, seeds)] == [len(completions)] * 4
    assert all(
        messages[-1] == {"role": "assistant", "content": said}
        for messages, said in zip(all_messages, completions, strict=True)
    )
    assert columns == {"answer": "42"} and {*map(len, rewards.values())} == {len(completions)}
    return [sum(row) + len(ids) for row, ids in zip(zip(*rewards.values(), strict=True), all_token_ids, strict=True)]


def huge(completion: str) -> float:
    return 1e308 if completion == "huge" else 1.0


def others(completion: str, rewards: dict[str, float | None]) -> float:
    return 10.0 * (rewards["length"] or 0.0)


class Counting:
    """Built once by its process, and keeps what it learned."""

    def __init__(self, *, step: int = 1) -> None:
        self._step = step
        self._num = 0

    def __call__(self, completion: str) -> float:
        self._num += self._step
        return float(self._num)


class Unbuildable:
    def __init__(self) -> None:
        raise RuntimeError("no licence")

    def __call__(self, completion: str) -> float: ...


def mixed(completion: str, prompts: list[str]) -> float: ...


def deaf(columns: dict[str, Any]) -> float: ...


def greedy(completion: str, budget: int) -> float: ...


def picky(completion: str) -> float:
    if completion.startswith("bad"):
        raise ValueError("no opinion")
    return 1.0


def of_a_group(completions: list[str], columns: dict[str, Any]) -> Any:
    """Does what the prompt's column says."""
    match columns["do"]:
        case "raise":
            raise ValueError("no opinion")
        case "hang":
            time.sleep(60)
        case "exit":
            os._exit(3)
        case "text":
            return "good"
        case "number":
            return 1.0
        case "nan":
            return [1.0, float("nan")]
        case "set":
            return {1.0, 0.0}
        case "short":
            return [1.0]
        case "one none":
            return [1.0, None]
        case "all none":
            return [None, None]
        case "fork":
            return [1.0, float(os.fork() > 0)]
    return [1.0, 0.0]


def reward_num_unique_chars(completions, **kwargs):
    """As in TRL's guide: more different characters are better."""
    return [len(set(content)) for content in completions]


def accuracy_of_math(completions, task, ground_truth, **kwargs):
    """As in TRL's guide on several tasks: None where the task is another one."""
    matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    said = [match.group(1) if match else "" for match in matches]
    return [float(s == gt) if t == "math" else None for s, gt, t in zip(said, ground_truth, task, strict=True)]


async def format_of_messages(completions, **kwargs):
    """As in TRL's guide, for a data set of messages; TRL takes coroutines too."""
    await asyncio.sleep(0)
    return [1.0 if re.match(r"^<think>.*?</think>", completion[0]["content"]) else 0.0 for completion in completions]


_CLIENT = asyncio.Queue[float]()


async def of_a_client(completions, **kwargs):
    """A client of the module that belongs to the event loop of its first use, as those of httpx and openai."""
    asyncio.get_running_loop().call_soon(_CLIENT.put_nowait, 1.0)
    return [await _CLIENT.get()] * len(completions)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """As in verl's documents."""
    assert data_source == "openai/gsm8k"
    assert extra_info == {"split": "train", "num_turns": 2, "rollout_reward_scores": {}}
    return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth, "pred": solution_str}


def reward_func(queries, prompts, labels, **kwargs):
    """As in OpenRLHF's example, with something to test instead of random numbers."""
    import torch

    said = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    reward = torch.tensor([float(each == label) for each, label in zip(said, labels, strict=True)])
    return {"rewards": 2 * reward, "scores": reward, "extra_logs": {"dummy_scores": reward}}


def reward_func_of_other_names(texts, asked, answers):
    """And with lists for tensors: to import torch takes a process seconds."""
    reward = [
        float(text.removeprefix(prompt) == answer) for text, prompt, answer in zip(texts, asked, answers, strict=True)
    ]
    return {"rewards": [2 * each for each in reward], "scores": reward}

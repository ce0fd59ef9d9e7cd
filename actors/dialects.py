"""Request and answer formats of other systems' reward servers, one entry of `DIALECTS` each."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.contracts.types import Reward, RewardStatus

Item = Mapping[str, Any]
"""A trajectory as `{prompt, completion, query, label}`, or a group as `{columns, trajectories}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    request: Callable[[Sequence[Item]], dict[str, Any]]
    """Makes the request's body for some items."""
    verdicts: Callable[[Any], Sequence[Any]]
    """Reads the answer: one verdict per item, of a type that a judge may return; for a group, a list of verdicts. Raises LookupError,
    TypeError, ValueError or AttributeError for an answer of another form."""
    texts: tuple[str, ...] = ("raw", "plain")
    """Allowed forms of the query's text, the default first. Empty: no query is sent."""
    path: str = ""
    """Path below the URL. Empty: the URL is the whole address."""
    sends_label: bool = True
    is_one_by_one: bool = False
    is_of_groups: bool = False


def _openrlhf(batch: Sequence[Item]) -> dict[str, Any]:
    """Source: OpenRLHF, openrlhf/utils/remote_rm_utils.py; openrlhf/cli/serve_rm.py adds the end token itself."""
    return {"query": _each(batch, "query"), "prompts": _each(batch, "prompt"), "labels": _each(batch, "label")}


def _of_openrlhf(answer: Any) -> Sequence[Any]:
    rewards, scores = _items(answer["rewards"]), answer.get("scores")
    if scores is None:
        return rewards
    return [{"reward": each, "score": score} for each, score in zip(rewards, _items(scores), strict=True)]


def _lightrft(batch: Sequence[Item]) -> dict[str, Any]:
    """Sends `references` only if an item has one, and never images. Source: LightRFT, lightrft/utils/remote_rm_utils.py `remote_rm_fn`"""
    body, references = {"queries": _each(batch, "query"), "prompts": _each(batch, "prompt")}, _each(batch, "label")
    return body if all(each is None for each in references) else body | {"references": references}


def _slime(batch: Sequence[Item]) -> dict[str, Any]:
    """Source: slime, slime/rollout/rm_hub/__init__.py `remote_rm`"""
    (only,) = batch
    return {"prompt": only["prompt"], "response": only["completion"], "label": only["label"]}


def _of_slime(answer: Any) -> Sequence[Any]:
    """A number, or a dict as `--reward-key score` reads it. The dict's other numbers become components."""
    if not isinstance(answer, Mapping):
        return [answer]
    numbers = {name: value for name, value in answer.items() if isinstance(value, int | float)}
    return [numbers | {"reward": numbers.pop("score") if "score" in numbers else numbers["reward"]}]


def _classify(batch: Sequence[Item]) -> dict[str, Any]:
    """The logit of the last class is the reward. Source: vLLM, `POST /classify`; verl, verl/experimental/reward_loop/reward_loop.py"""
    queries = _each(batch, "query")
    if isinstance(queries[0], str):
        return {"use_activation": False, "input": queries}
    (messages,) = queries
    return {"use_activation": False, "messages": [_with_calls_of_openai(each) for each in messages]}


def _with_calls_of_openai(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its tool calls as OpenAI's API has them: each with an id, the arguments as text."""
    calls = list[Any]()
    for place, call in enumerate(message.get("tool_calls") or ()):
        given = call["function"].get("arguments")
        text = given if isinstance(given, str) else json.dumps(given)
        calls.append({"id": f"call{place:05}", **call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls} if calls else message


def _of_classify(answer: Any) -> Sequence[Any]:
    scores = {each["index"]: each["probs"][-1] for each in _items(answer["data"])}
    # A repeated index, or one out of range, leaves a place without a score: a KeyError.
    return [scores[place] for place in range(len(answer["data"]))]


def _of_native(answer: Any) -> Sequence[Any]:
    return [[_reward(each) for each in _items(group)] for group in _items(answer["groups"])]


def _reward(answer: Mapping[str, Any]) -> Any:
    if "error" in answer:
        return Reward(value=None, status=RewardStatus(answer["status"]), message=str(answer["error"]))
    return {**answer.get("components", {}), "reward": answer["reward"]}


def native_answer(reward: Reward) -> dict[str, Any]:
    """`{reward, components}`, or `{status, error}` for a failed trajectory."""
    if reward.status is RewardStatus.OK:
        return {"reward": reward.value, "components": reward.components}
    return {"status": str(reward.status), "error": reward.message}


def _each(batch: Sequence[Item], name: str) -> list[Any]:
    return [each[name] for each in batch]


def _items(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, got a {type(value).__name__}")
    return value


DIALECTS = {
    "openrlhf": Dialect(request=_openrlhf, verdicts=_of_openrlhf),
    "lightrft": Dialect(request=_lightrft, verdicts=lambda answer: _items(answer["rewards"])),
    "slime": Dialect(request=_slime, verdicts=_of_slime, texts=(), is_one_by_one=True),
    "classify": Dialect(
        request=_classify, verdicts=_of_classify, texts=("chat", "raw", "plain"), path="/classify", sends_label=False
    ),
    "native": Dialect(
        request=lambda batch: {"groups": batch},
        verdicts=_of_native,
        texts=(),
        path="/judge",
        sends_label=False,
        is_of_groups=True,
    ),
}

"""Tries the judges on samples, as the run will call them: in their own processes, under their deadlines."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from cluster.contracts.config import RewardConfig
from cluster.contracts.errors import ConfigError, DataError, UnavailableError, WorkerError
from cluster.contracts.protocols import PromptSource
from cluster.contracts.types import FinishReason, Prompt, Reward, RewardStatus
from deploy.preflight.judge_servers import check_servers

if TYPE_CHECKING:
    from actors.chat.formatter import ChatFormatter
    from actors.reward_model import Reading
    from actors.reward_service.service import Told

_NUM_PROMPTS = 3
"""Prompts of each source of `reward.by_source`."""
_SCAN_S = 2.0
"""Time limit of the search for prompts of each source."""
_MOST_IN_GROUP = 4
"""Trajectories of a group: enough for a judge that compares them."""
_ANSWER_COLUMNS = ("answer", "solution", "target", "ground_truth", "label", "completion", "response", "output")
"""Usual names of the column with the right answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The judge's reward of one completion."""

    field: str
    """The setting that names the prompt's source."""
    prompt: Prompt
    completion: str
    """Description of the completion, not its text."""
    reward: Reward


def judge_samples(
    config: RewardConfig,
    sources: Mapping[str, PromptSource],
    formatter: "ChatFormatter | None",
    *,
    models: Mapping[str, "Reading"],
    group_sizes: Mapping[str, int],
) -> list[Sample]:
    """Judges two completions of the first prompts of each source: an empty one and, if a column has it, the answer. `sources` and
    `group_sizes` are by the setting that names the source.

    Reward models are not run: their scores are 0. Judges that ask `reward.servers` are built, not called. Raises ConfigError if the judge
    does not load, if a server that it calls is unavailable, or if it or one of its parts fails on every sample of a source. Failures on
    some samples are not an error.
    """
    if (tried := check_servers(config)) is None:
        return []
    config = tried
    try:
        samples, failing = asyncio.run(_judged(config, sources, formatter, models, group_sizes))
    except WorkerError as error:
        raise ConfigError(f"{error}; run it on its own to see why") from error
    except UnavailableError as error:
        raise ConfigError(str(error)) from error
    for field in sources:
        _refuse_failure([sample for sample in samples if sample.field == field], config)
    for field, part in (each for each, fails_always in failing.items() if fails_always):
        messages = (sample.reward.message for sample in samples if sample.field == field and sample.reward.message)
        why = next((message for message in messages if f"judge:{part} " in message), "no message")
        raise ConfigError(
            f"{field}: reward.parts.{part} fails on each of its samples, the first time with: {why}; correct it"
        )
    return samples


def _refuse_failure(samples: Sequence[Sample], config: RewardConfig) -> None:
    """Raises ConfigError for a judge that fails on all samples of one source."""
    if not samples or any(sample.reward.status is RewardStatus.OK for sample in samples):
        return
    first = samples[0]
    columns = ", ".join(sorted(first.prompt.columns)) or "none"
    judges = f"reward.judge={config.only_judge.name!r}" if config.only_judge else "reward.parts"
    raise ConfigError(
        f"{first.field}: {judges} fails on each of {len(samples)} samples, the first time with: "
        f"{first.reward.message}; correct it (its parameter `columns` has, for the prompt {first.prompt.prompt_id!r}: {columns})"
    )


async def _judged(
    config: RewardConfig,
    sources: Mapping[str, PromptSource],
    formatter: "ChatFormatter | None",
    models: Mapping[str, "Reading"],
    group_sizes: Mapping[str, int],
) -> tuple[list[Sample], dict[tuple[str, str], bool]]:
    """The samples, and by field and part whether the part failed on all trajectories.

    Stops after a prompt on which a judge overran its deadline, as it may do so on all others.
    """
    from actors.reward_service.service import Asked, RewardService

    service = RewardService(config.model_copy(update={"hold_s": 0.0}))
    samples, failing = list[Sample](), dict[tuple[str, str], bool]()
    try:
        for field, source in sources.items():
            size = min(group_sizes[field], _MOST_IN_GROUP)
            for prompt, completions in _groups(source, config, size=size):
                group = [*islice(cycle(completions.values()), size)]
                asked = Asked(
                    columns=prompt.info(),
                    trajectories=[_trajectory(prompt, each, formatter, models) for each in group],
                )
                rewards, stats = await service.judge(asked)
                for part, of_part in stats.items():
                    failing[field, part] = failing.get((field, part), True) and of_part.num_failed == size
                samples += [
                    Sample(field=field, prompt=prompt, completion=described, reward=reward)
                    for described, reward in zip(completions, rewards, strict=False)  # the others repeat these
                ]
                if any(reward.status is RewardStatus.TIMEOUT for reward in rewards):
                    return samples, failing
    finally:
        await service.close()
    return samples, failing


def _groups(source: PromptSource, config: RewardConfig, *, size: int) -> Iterator[tuple[Prompt, dict[str, str]]]:
    """For each group its prompt, and its completions by their descriptions."""
    for prompt in _firsts(source, config):
        completions = [*_completions(prompt)]
        for start in range(0, len(completions), size):
            yield prompt, dict(completions[start : start + size])


def _trajectory(
    prompt: Prompt, completion: str, formatter: "ChatFormatter | None", models: Mapping[str, "Reading"]
) -> dict[str, Any]:
    from actors.reward_service.service import Told, conversation

    text = _text(prompt, formatter)
    messages = conversation(prompt.info(), prompt=text, completion=completion)
    told = Told(prompt=text, completion=completion, messages=messages)
    return {
        "prompt": text,
        "completion": completion,
        "messages": messages,
        "token_ids": _token_ids(prompt, completion, formatter),
        "finish_reason": str(FinishReason.STOP),
        "seed": 0,
        "scores": {name: _zeros(each, told) for name, each in models.items()},
    }


def _zeros(model: "Reading", told: "Told") -> dict[str, float] | str:
    read = model.read(told)
    return read if isinstance(read, str) else dict.fromkeys(model.labels, 0.0)


def _token_ids(prompt: Prompt, completion: str, formatter: "ChatFormatter | None") -> list[int]:
    """At least one, as engines sample: an empty completion is its end."""
    if formatter is None:
        return [0]
    with suppress(DataError):
        return formatter.encode_completion(prompt, completion)
    return [*formatter.stop_token_ids[:1]] or [0]


def _firsts(source: PromptSource, config: RewardConfig) -> list[Prompt]:
    """The first prompts; with `by_source` the first prompts of each source that a short search finds."""
    missing = Counter(dict.fromkeys(config.by_source or [""], _NUM_PROMPTS))
    found, deadline = list[Prompt](), time.monotonic() + _SCAN_S
    for index in range(len(source)):
        if missing.total() == 0 or time.monotonic() > deadline:
            break
        prompt = source[index]
        name = str(prompt.columns.get(config.source_column)) if config.by_source else ""
        if missing[name]:
            missing[name] -= 1
            found.append(prompt)
    return found


def _completions(prompt: Prompt) -> Iterator[tuple[str, str]]:
    yield "an empty completion", ""
    named = (name for name in _ANSWER_COLUMNS if isinstance(prompt.columns.get(name), str | int | float))
    for name in islice(named, 1):
        yield f"the text of column {name!r}", str(prompt.columns[name])


def _text(prompt: Prompt, formatter: "ChatFormatter | None") -> str:
    """The prompt as the judge gets it; its bare text if the chat template fails, which another check reports."""
    if formatter is not None:
        try:
            return formatter.encode(prompt).text
        except DataError:
            pass
    last: dict[str, Any] = (prompt.messages or [{}])[-1]
    return prompt.text or str(last.get("content", ""))

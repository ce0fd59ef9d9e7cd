"""Rewards from a server: another system's reward model, or `treadwheel serve-reward`."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import NonNegativeFloat, PositiveInt

from actors.batching import Batches
from actors.columns import value_of
from actors.dialects import DIALECTS, Item
from actors.http import CHARACTERS_PER_TOKEN, Endpoint, HttpClient
from actors.reward_service.judgement import failed
from actors.reward_service.service import conversation
from cluster.contracts.errors import ConfigError, DataError, UnavailableError

Text = Literal["raw", "plain", "chat"]


class Remote:
    """Sends several trajectories a request, also of different groups. slime and chats get one trajectory a request.

    `endpoint` is a URL, a list of equivalent URLs, or `{urls, key_env, ca_file, max_concurrency, requests_per_minute, tokens_per_minute}`.
    openrlhf, lightrft and slime use the URL itself, classify uses URL/classify, native URL/judge. `column` is sent as label or reference;
    null sends none. `text` is the form of a query. `raw`: prompt and completion with the special tokens of the policy's template, except
    the last. `plain`: the contents of the messages. `chat` (classify only): the messages, for the server's own template. A request is sent
    when it has `batch_size` trajectories (native: groups; default 32), or `batch_s` after its first one. During an outage groups wait; any
    other error is a failed reward.
    """

    keeps_verdicts = True

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        dialect: Literal["openrlhf", "lightrft", "slime", "classify", "native"] = "native",
        column: str | None = "answer",
        text: Text | None = None,
        model: str | None = None,
        batch_size: PositiveInt | None = None,
        batch_s: NonNegativeFloat = 0.01,
    ) -> None:
        """`model` is the model's name on the classify server. Raises ConfigError for a setting that the dialect does not use."""
        self._name, self._dialect, self._endpoint, self._column = dialect, DIALECTS[dialect], endpoint, column
        texts = self._dialect.texts
        if text is not None and text not in texts:
            raise ConfigError(f"text={text} is not for dialect {dialect}, which takes: {', '.join(texts) or 'none'}")
        if (model is None) == (dialect == "classify"):
            raise ConfigError(f"model={model!r} with dialect {dialect}: classify needs a model, the others take none")
        self._text = text or (*texts, "raw")[0]
        # Raw text already has the special tokens of the policy's template.
        tokens = {"add_special_tokens": self._text == "plain"} if self._text != "chat" else {}
        self._more = {"model": model, **tokens} if model else {}
        self._client = HttpClient(endpoint)
        is_one_by_one = self._text == "chat" or self._dialect.is_one_by_one
        if is_one_by_one and batch_size is not None:
            raise ConfigError(
                f"batch_size={batch_size} with dialect {dialect}, which gets one trajectory a request here; leave it out"
            )
        self._batches = Batches(self._judged, size=1 if is_one_by_one else batch_size or 32, wait_s=batch_s)

    async def __call__(
        self,
        *,
        prompts: Sequence[str],
        completions: Sequence[str],
        all_messages: Sequence[Sequence[Any]],
        all_token_ids: Sequence[Sequence[int]],
        finish_reasons: Sequence[str],
        seeds: Sequence[int],
        columns: Mapping[str, Any],
    ) -> Sequence[Any]:
        rows = zip(prompts, completions, all_token_ids, finish_reasons, seeds, strict=True)
        if self._dialect.is_of_groups:
            names = ("prompt", "completion", "token_ids", "finish_reason", "seed")
            trajectories = [
                _as_said(dict(zip(names, row, strict=True)), messages, columns)
                for row, messages in zip(rows, all_messages, strict=True)
            ]
            return await self._batches.result({"columns": columns, "trajectories": trajectories})
        label = value_of(columns, self._column) if self._column and self._dialect.sends_label else None
        items = [
            {"prompt": prompt, "completion": said, "query": self._query(prompt + said, messages), "label": label}
            for (prompt, said, *_), messages in zip(rows, all_messages, strict=True)
        ]
        verdicts = await asyncio.gather(*map(self._batches.result, items), return_exceptions=True)
        if away := next((each for each in verdicts if isinstance(each, UnavailableError)), None):
            raise away
        # A list of None for all would mean that the judge does not judge this prompt.
        verdicts = [DataError("the server answered null") if each is None else each for each in verdicts]
        return [failed(verdict) if isinstance(verdict, BaseException) else verdict for verdict in verdicts]

    def _query(self, raw: str, messages: Sequence[Any]) -> Any:
        if self._text == "raw":
            return raw
        if self._text == "chat":
            return messages
        # A message of tool calls alone may have null as its content.
        said = [each.get("content") or "" for each in messages]
        if not all(isinstance(each, str) for each in said):
            raise DataError("text=plain needs messages that are only text, and this prompt has another one; use raw")
        return "\n".join(said)

    async def _judged(self, items: Sequence[Item]) -> Sequence[Any]:
        """Raises as `HttpClient.post`, and DataError for an answer of the wrong form or length."""
        rows = [row for item in items for row in item.get("trajectories", [item])]
        num_tokens = sum(len(row["prompt"] + row["completion"]) for row in rows) // CHARACTERS_PER_TOKEN
        body = self._dialect.request(items) | self._more
        answer = await self._client.post(self._dialect.path, body, num_tokens=num_tokens)
        servers = ", ".join(self._endpoint.urls)
        try:
            verdicts = self._dialect.verdicts(answer)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
            raise DataError(f"{servers}: not an answer of dialect {self._name} ({why}): {str(answer)[:200]}") from error
        lengths = [(len(verdicts), len(items))]
        if self._dialect.is_of_groups:
            lengths += [(len(of), len(item["trajectories"])) for of, item in zip(verdicts, items, strict=False)]
        if wrong := next((pair for pair in lengths if pair[0] != pair[1]), None):
            raise DataError(f"{servers}: {wrong[0]} rewards for {wrong[1]} trajectories or groups")
        return verdicts


def _as_said(trajectory: dict[str, Any], messages: Sequence[Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the messages of an episode. For a single turn the server can build them from the other fields."""
    known = conversation(columns, prompt=trajectory["prompt"], completion=trajectory["completion"])
    return trajectory if messages == known else trajectory | {"messages": messages}


remote = Remote

"""Asks a chat server that speaks OpenAI's API for the grades of one conversation, and once more where its answer cannot be read."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeFloat, PositiveInt

from actors.http import CHARACTERS_PER_TOKEN, Endpoint, HttpClient, HttpError
from actors.rubrics.rubric import Rubric
from cluster.contracts.errors import ConfigError, DataError, UnavailableError
from cluster.contracts.settings import Section

_REFUSALS = (400, 422)
"""Of a request whose fields the server does not take."""
_SHOWN = 200


class ChatEndpoint(Endpoint):
    urls: tuple[str, ...] = Field(min_length=1)
    """Base URLs, as OpenAI's clients take them: `https://api.openai.com/v1`."""
    model: str
    """The name that the servers know it by."""


class Asking(Section):
    """How a model is asked."""

    temperature: NonNegativeFloat = 0.0
    max_tokens: PositiveInt = 1024
    """Of one answer, its reasoning included. A longer one cannot be read."""
    seed: int = 0
    body: dict[str, Any] = Field(default={})
    """Other fields of each request; null leaves a field out: `{max_tokens: null, max_completion_tokens: 2048}`."""


class Grades(NamedTuple):
    """Of one question."""

    values: dict[str, float]
    """By criterion."""
    num_tokens: int
    """That the server counted, prompts included."""


class ChatJudge:
    """Exactly one of `endpoint` and `server`, a name of `reward.servers`, is where it asks."""

    def __init__(self, rubric: Rubric, asking: Asking, *, endpoint: ChatEndpoint | None, server: str | None) -> None:
        """Raises ConfigError unless one is given, and as HttpClient."""
        if (endpoint is None) == (server is None):
            raise ConfigError(
                "an LLM judge takes one of endpoint: {urls: [...], model: ...} and server: NAME; give one"
            )
        self._rubric = rubric
        self._asking = asking
        self._server = server
        self._model = endpoint.model if endpoint else server
        self._client = HttpClient(endpoint) if endpoint else None
        self._takes_schema = True

    async def grades(
        self, messages: Sequence[Mapping[str, str]], *, seed: int, servers: Mapping[str, Sequence[str]]
    ) -> Grades:
        """Raises DataError when the answer to the repair question cannot be read either, and what `HttpClient.post` raises."""
        text, values, num_tokens = await self._answer(messages, seed, servers)
        if values is None:
            repair = f"Your answer cannot be read: it is cut off, or not in the form asked for. {self._rubric.form()}"
            again = [{"role": "assistant", "content": text}, {"role": "user", "content": repair}]
            text, values, num_more = await self._answer([*messages, *again], seed, servers)
            num_tokens += num_more
        if values is None:
            raise DataError(f"the judge gave no grades in two answers, the second of which ends: {text[-_SHOWN:]!r}")
        return Grades(values, num_tokens)

    async def _answer(
        self, messages: Sequence[Mapping[str, str]], seed: int, servers: Mapping[str, Sequence[str]]
    ) -> tuple[str, dict[str, float] | None, int]:
        """What it says, the grades in it, and the tokens that it took."""
        asking = self._asking
        fields = {"temperature": asking.temperature, "max_tokens": asking.max_tokens, "seed": seed, **asking.body}
        body = {"model": self._model, "messages": messages, **fields}
        answer = await self._in_form({name: value for name, value in body.items() if value is not None}, servers)
        try:
            # What a server takes out as reasoning is another field, and no answer.
            choice, used = answer["choices"][0], (answer.get("usage") or {}).get("total_tokens") or 0
            text, is_cut_off = str(choice["message"].get("content") or ""), choice.get("finish_reason") == "length"
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise DataError(f"the answer is no chat completion ({why}): {str(answer)[:_SHOWN]}") from error
        if is_cut_off:
            return f"{text} [cut off by max_tokens]", None, used
        return text, self._rubric.grades_in(text), used

    async def _in_form(self, body: Mapping[str, Any], servers: Mapping[str, Sequence[str]]) -> Any:
        """With the form enforced by the server, unless it has refused that before."""
        if not self._takes_schema:
            return await self._post(body, servers)
        form = {"name": "grades", "strict": True, "schema": self._rubric.schema()}
        try:
            return await self._post({**body, "response_format": {"type": "json_schema", "json_schema": form}}, servers)
        except HttpError as error:
            if error.status not in _REFUSALS:
                raise
        answer = await self._post(body, servers)
        self._takes_schema = False  # not before: it may have refused the question, and not the form
        return answer

    async def _post(self, body: Mapping[str, Any], servers: Mapping[str, Sequence[str]]) -> Any:
        num_tokens = len(str(body["messages"])) // CHARACTERS_PER_TOKEN + self._asking.max_tokens
        urls = list[str]()
        if self._server is not None:
            parts = [urlsplit(url) for url in servers.get(self._server, ())]
            if not parts:
                raise UnavailableError(f"reward.servers.{self._server} is not up", endpoint=self._server)
            urls = [each._replace(netloc=each.netloc.rpartition("@")[2]).geturl() for each in parts]
            self._client = self._client or HttpClient(Endpoint(), key=parts[0].password)
        assert self._client is not None, "it has an endpoint"
        return await self._client.post("/chat/completions", body, urls=urls, num_tokens=num_tokens)


def prompt_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """What came before the completion, the last of `messages`: the text of the only message, or all with their roles."""
    asked = messages[:-1]
    if len(asked) == 1:
        return str(asked[0]["content"])
    return "\n\n".join(f"[{each['role']}]\n{each['content']}" for each in asked)

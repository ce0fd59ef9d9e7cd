"""Asks a chat server with OpenAI's API for the grades of one conversation, and once more if its answer is unreadable."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeFloat, PositiveInt

from actors.http import CHARACTERS_PER_TOKEN, Endpoint, HttpClient, HttpError
from actors.rubrics.rubric import Rubric
from actors.rubrics.turns import Message
from cluster.contracts.errors import ConfigError, DataError, UnavailableError
from cluster.contracts.settings import Section

_REFUSALS = (400, 422)
"""Statuses for a request with fields that the server does not accept."""
_SHOWN = 200


class ChatEndpoint(Endpoint):
    urls: tuple[str, ...]
    """Base URLs in the form of OpenAI's clients: `https://api.openai.com/v1`."""
    model: str
    """The model's name on the servers."""


class Asking(Section):
    """Settings of the requests to a judging model."""

    temperature: NonNegativeFloat = 0.0
    max_tokens: PositiveInt = 1024
    """Of one answer, including its reasoning. A longer answer is cut off and unreadable."""
    seed: int = 0
    body: dict[str, Any] = Field(default={})
    """Further fields of each request. null removes a field: `{max_tokens: null, max_completion_tokens: 2048}`."""


class Grades(NamedTuple):
    """The grades for one question."""

    values: dict[str, float]
    """By criterion."""
    num_tokens: int
    """Counted by the server, including prompts."""


class ChatJudge:
    """Asks either `endpoint`, or `server`, a name of `reward.servers`."""

    def __init__(self, rubric: Rubric, asking: Asking, *, endpoint: ChatEndpoint | None, server: str | None) -> None:
        """Raises ConfigError unless exactly one is given, and as `HttpClient`."""
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
        """Raises DataError if the answer to the repair question is unreadable too. Errors of `HttpClient.post` pass through."""
        text, values, num_tokens = await self._answer(messages, seed, servers)
        if values is None:
            repair = f"Your answer cannot be read: it is cut off, or not in the form asked for. {self._rubric.form()}"
            # Some servers refuse an empty message.
            again = [{"role": "assistant", "content": text.strip() or "[no text]"}, {"role": "user", "content": repair}]
            text, values, num_more = await self._answer([*messages, *again], seed, servers)
            num_tokens += num_more
        if values is None:
            raise DataError(f"the judge gave no grades in two answers, the second of which ends: {text[-_SHOWN:]!r}")
        return Grades(values, num_tokens)

    async def _answer(
        self, messages: Sequence[Mapping[str, str]], seed: int, servers: Mapping[str, Sequence[str]]
    ) -> tuple[str, dict[str, float] | None, int]:
        """The answer's text, its grades or None, and the tokens used."""
        asking = self._asking
        fields = {"temperature": asking.temperature, "max_tokens": asking.max_tokens, "seed": seed, **asking.body}
        body = {"model": self._model, "messages": messages, **fields}
        answer = await self._in_form({name: value for name, value in body.items() if value is not None}, servers)
        try:
            # Servers that separate reasoning put it into another field, which is not the answer.
            choice, used = answer["choices"][0], (answer.get("usage") or {}).get("total_tokens") or 0
            text, is_cut_off = _text(choice["message"].get("content")), choice.get("finish_reason") == "length"
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise DataError(f"the answer is not a chat completion ({why}): {str(answer)[:_SHOWN]}") from error
        if is_cut_off:
            return f"{text} [cut off by max_tokens]", None, used
        return text, self._rubric.grades_in(text), used

    async def _in_form(self, body: Mapping[str, Any], servers: Mapping[str, Sequence[str]]) -> Any:
        """Posts the request with the answer's form enforced by the server, unless the server has refused that before, or `asking.body`
        names a form."""
        if not self._takes_schema or "response_format" in self._asking.body:
            return await self._post(body, servers)
        form = {"name": "grades", "strict": True, "schema": self._rubric.schema()}
        try:
            return await self._post({**body, "response_format": {"type": "json_schema", "json_schema": form}}, servers)
        except HttpError as error:
            if error.status not in _REFUSALS:
                raise
        answer = await self._post(body, servers)
        self._takes_schema = False  # set only now: the server may have refused the question and not the form
        return answer

    async def _post(self, body: Mapping[str, Any], servers: Mapping[str, Sequence[str]]) -> Any:
        num_tokens = len(str(body["messages"])) // CHARACTERS_PER_TOKEN + self._asking.max_tokens
        urls = list[str]()
        if self._server is not None:
            parts = [urlsplit(url) for url in servers.get(self._server, ())]
            if not parts:
                raise UnavailableError(f"reward.servers.{self._server} is not up", endpoint=self._server)
            urls = [each._replace(netloc=each.netloc.rpartition("@")[2]).geturl() for each in parts]
            self._client = self._client or HttpClient(Endpoint(urls=tuple(urls)), key=parts[0].password)
        assert self._client is not None, "it has an endpoint"
        return await self._client.post("/chat/completions", body, urls=urls, num_tokens=num_tokens)


def _text(content: Any) -> str:
    """The answer's text. Some servers write a list of parts, in which reasoning has a type of its own."""
    if isinstance(content, list):
        parts = cast("list[Any]", content)
        return "".join(part["text"] for part in parts if part["type"] == "text")
    return str(content or "")


# Named as in llm_judge.py: that file's bytes are part of the keys of kept verdicts, which a change there would ask for again.
def prompt_text(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages before the completion, which is the words of the last of `messages`, and the tool calls of that message.

    `Rubric.conversation` makes the prompt's text of them.
    """
    *before, last = messages
    return [*before, {**last, "content": None}] if last.get("tool_calls") else before

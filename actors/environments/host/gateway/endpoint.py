"""Answers the requests of one episode. A request has a raw prompt, or a whole history to compare with the context."""

import asyncio
import hmac
import secrets
from dataclasses import replace

from actors.environments.host.conversation import Conversation, asks_at_once
from actors.environments.host.gateway.answers import with_ids
from actors.environments.host.gateway.history import added_to, without_ids
from actors.environments.host.gateway.refusals import RefusedError
from actors.environments.host.gateway.requests import ChatRequest, RawRequest
from cluster.contracts.episodes import Asked, Message, Said
from cluster.contracts.errors import DataError, EpisodeOver, Limit, TooLongError

_CODES = {
    Limit.CONTEXT: "context_length_exceeded",
    Limit.TURNS: "max_turns",
    Limit.TURN_LENGTH: "turn_length",
    Limit.DEADLINE: "timeout_s",
}


class EpisodeEndpoint:
    """Answers one request at a time, in the order of arrival. Other requests wait. Refusing them would be worse: clients of OpenAI's API
    would repeat them at once and out of order."""

    def __init__(self, conversation: Conversation, base_url: str) -> None:
        self.base_url = base_url
        self.api_key = f"sk-{secrets.token_urlsafe(32)}"
        self._conversation = conversation
        self._is_free = asyncio.Lock()
        self._made_ids: set[str] = set()

    def check_key(self, authorization: str) -> None:
        """Raises RefusedError for a wrong key."""
        given = authorization.encode(errors="surrogateescape")  # as aiohttp decodes bytes that are not UTF-8
        if not hmac.compare_digest(given, f"Bearer {self.api_key}".encode()):
            raise RefusedError(
                "this is not the key of the episode: use episode.api_key", status=401, code="invalid_api_key"
            )

    @property
    def sampling(self) -> dict[str, object]:
        return dict(self._conversation.sampling)

    async def answer(self, request: ChatRequest | RawRequest) -> Said:
        """The model's turn, with an id for each call. Raises RefusedError. If it is cancelled during the turn, no turn can follow."""
        async with self._is_free:
            if self._conversation.is_over:
                raise over()
            # Checked before the request's history is read, which would replace the environment's own.
            if self._conversation.is_asking:
                raise RefusedError(str(asks_at_once(self._conversation.id)), status=409, code="asks_at_once")
            try:
                said = await self._said(request)
            except EpisodeOver as error:
                status = 400 if error.limit.is_policys_doing else 410
                raise RefusedError(str(error), status=status, code=_CODES[error.limit]) from error
            except DataError as error:
                field = "messages" if isinstance(request, ChatRequest) else "prompt"
                code = _CODES[Limit.CONTEXT] if isinstance(error, TooLongError) else None
                raise RefusedError(str(error), code=code, param=field) from error
            except RuntimeError as error:  # the episode cannot go on
                raise RefusedError(str(error), status=409, code="asks_at_once") from error
            said, made = with_ids(said)
            self._made_ids |= made
            return said

    async def _said(self, request: ChatRequest | RawRequest) -> Said:
        asked = Asked(max_tokens=request.max_tokens, stop=request.stop)
        if isinstance(request, RawRequest):
            asked = replace(asked, raw=request.prompt, wants_token_ids=request.wants_token_ids)
        else:
            asked = replace(asked, messages=self._new_in(request), tools=request.tools)
        return await self._conversation.turn_at_endpoint(asked)

    def _new_in(self, request: ChatRequest) -> tuple[Message, ...]:
        """The messages to ask with. If the history differs from the context, or its tools do, the context is rewritten first."""
        conversation = self._conversation
        messages = without_ids(request.messages, self._made_ids)
        added = None if conversation.context is None else added_to(conversation.context, messages)
        goes_on = added and request.tools in ((), conversation.shown_tools)
        if added is None or not (goes_on or conversation.needs_no_messages):
            conversation.rewrite(messages)
            return ()
        return added


def over() -> RefusedError:
    return RefusedError("the episode is over and cannot ask any more", status=410, code="episode_over")

"""What a rollout worker needs for episodes, beside the engine."""

from collections.abc import Sequence

from actors.chat.formatter import ChatFormatter
from actors.processes.printed import PrintedLines
from actors.rollout.engine_thread import EngineThread
from actors.rollout.episodes.group import EpisodeGroup
from actors.rollout.episodes.hosts import Hosts
from actors.rollout.episodes.speech import Speech
from actors.rollout.episodes.turns import TurnSampler
from actors.rollout.inbox import Inbox
from cluster.contracts.config import RunConfig
from cluster.contracts.types import Ticket


class Episodes:
    """Of a run in which some prompts may have several turns."""

    def __init__(self, config: RunConfig, formatter: ChatFormatter) -> None:
        """Raises ConfigError for a model whose conversations are not exact."""
        self._config = config
        self.is_played = config.is_played
        self._speech = Speech(formatter)
        self._hosts: Hosts | None = None
        self.printed = PrintedLines()

    async def start(self) -> None:
        """Raises as `Hosts.start`."""
        if self._hosts is None:
            self._hosts = await Hosts.start(self._config, printed=self.printed)

    def group(self, ticket: Ticket, *, environment: str, key: str) -> EpisodeGroup:
        """Raises DataError as an `EpisodeGroup`."""
        assert self._hosts is not None, "they start before the first group"
        return EpisodeGroup(
            ticket=ticket,
            environment=environment,
            key=key,
            speech=self._speech,
            hosts=self._hosts,
            config=self._config.episodes,
        )

    def begin(self, groups: Sequence[EpisodeGroup], engine: EngineThread, inbox: Inbox) -> None:
        """Starts the groups of one call, which `inbox` hears of."""
        assert self._hosts is not None, "they start before the first group"
        places = (self._hosts.num_places(group.environment) for group in groups)
        num_places = min(
            (each for each in places if each is not None), default=self._config.max_concurrent_trajectories
        )
        sampler = TurnSampler(engine, inbox, lockstep_of=num_places if self._config.deterministic else None)
        place = 0
        for group in groups:
            place = group.start(sampler, inbox, first_place=place)

    async def close(self) -> None:
        """Ends their processes."""
        if self._hosts is not None:
            await self._hosts.close()

"""One question, one answer."""

from cluster.contracts.episodes import Episode


async def single_turn(episode: Episode) -> None:
    """The default: the model answers the prompt once, and the judges decide. Rollout workers sample it without an environment process."""
    await episode.ask()

"""One question, one answer."""

from cluster.contracts.episodes import Episode


async def single_turn(episode: Episode) -> None:
    """What a run without an environment does: the model answers the prompt once, and the judges decide. Rollout workers sample it without
    a process of its own."""
    await episode.ask()

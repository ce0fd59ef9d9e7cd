"""Reinforcement-learning post-training of language models, from Python: start runs and read their results.

    import treadwheel

    def judge(*, completion: str, columns: dict) -> float:
        return float(completion.strip() == columns["answer"])

    if __name__ == "__main__":
        run = treadwheel.train("my_run.yaml", ["num_steps=50"], judge=judge)
        print(run.summary.reward_last, run.metrics.column("reward/mean"))

The names in `__all__` are the interface; everything else is private. They do the same as the command `treadwheel`, with the same checks and
actors. docs/python.md
"""

from treadwheel import own_packages

own_packages.load()

from cluster.contracts.config import RunConfig  # noqa: E402
from cluster.contracts.episodes import BlockingEpisode, Episode, Said, ToolCall  # noqa: E402
from cluster.contracts.errors import (  # noqa: E402
    ConfigError,
    DataError,
    EpisodeOver,
    ToolError,
    TreadwheelError,
    UnavailableError,
)
from cluster.contracts.tools import Tool, tool  # noqa: E402
from cluster.contracts.types import Reward  # noqa: E402
from treadwheel.runs import Checkpoint, Run, open_run  # noqa: E402
from treadwheel.training import Callback, check, train  # noqa: E402

__all__ = [
    "BlockingEpisode",
    "Callback",
    "Checkpoint",
    "ConfigError",
    "DataError",
    "Episode",
    "EpisodeOver",
    "Reward",
    "Run",
    "RunConfig",
    "Said",
    "Tool",
    "ToolCall",
    "ToolError",
    "TreadwheelError",
    "UnavailableError",
    "check",
    "open_run",
    "tool",
    "train",
]

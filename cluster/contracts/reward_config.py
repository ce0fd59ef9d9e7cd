"""What judges completions, and what a judge may take."""

from pydantic import PositiveFloat, PositiveInt

from cluster.contracts.plugins import Plugin
from cluster.contracts.settings import Mathematics, Resources, Section


class RewardConfig(Section):
    judge: Mathematics[Plugin] = Plugin(name="exact_match")
    """A name below actors.rewards, or a function of yours as 'my_package.module:name'."""
    timeout_s: Resources[PositiveFloat] = 30.0
    """Deadline of one trajectory's reward; beyond it the status is `timeout`."""
    max_concurrency: Resources[PositiveInt] = 64
    """Trajectories that are judged at the same time."""
    max_memory_bytes: Resources[PositiveInt] = 8 * 1024**3
    """What a judge's process may take, beyond which it gets a MemoryError."""
    env: Resources[tuple[str, ...]] = ()
    """Environment variables that a judge sees beside PATH, HOME, locale and threads, by name: `[OPENAI_API_KEY]`. No token reaches it
    unless it stands here."""

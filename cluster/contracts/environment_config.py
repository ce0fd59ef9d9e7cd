"""Settings of environments and episodes."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from cluster.contracts.plugins import Plugin
from cluster.contracts.settings import Layout, Mathematics, Resources, Section

SINGLE_TURN = Plugin(name="single_turn")


class EpisodesConfig(Section):
    """Settings of all environments except `single_turn`."""

    column: Mathematics[str] = "environment"
    """The prompt's column that names one of `environments`."""
    max_turns: Mathematics[PositiveInt] = 16
    """Limit of the model's turns in one episode, tool calls included. Beyond it an episode ends as `length` and keeps what it earned."""
    on_turn_length: Mathematics[Literal["end", "continue"]] = "end"
    """Effect of a turn that is truncated at its token limit. `end`: it is the model's last turn; the environment may still return a reward.
    `continue`: the template closes the turn, and the episode continues."""
    history: Mathematics[Literal["append", "template"]] = "append"
    """How the model sees earlier turns. `append`: as the exact tokens that were sampled or given. `template`: as the chat template renders
    the conversation now. Where the two differ, for example because the template drops earlier reasoning, the episode continues in a new
    segment that begins with the new rendering. This is the view behind a server that keeps no tokens; it costs more rows."""
    parser: Mathematics[Plugin | None] = None
    """Parses tool calls in the model's text, for models whose calls neither the tokenizer's response template nor a parser made from the
    chat template reads correctly: `{name: vllm, parser: hermes, tokenizer: PATH}`, or a function of yours as 'my_package.module:name'. It
    takes `text`, without the token that ended the turn, and `tools`, and returns text and calls. None takes the one of the two that reads
    calls correctly."""
    compared_share: Resources[Annotated[float, Field(ge=0, le=1)]] = 0.01
    """Share of episodes whose prompts are compared, turn by turn, with the chat template's rendering of the whole conversation. The metric
    `environment/<name>/uncanonical_share` is the share that differs."""
    timeout_s: Resources[PositiveFloat] = 300.0
    """Deadline of a whole episode. An episode that exceeds it has failed and has no reward."""
    cleanup_s: Resources[PositiveFloat] = 5.0
    """Time for `finally` and `async with` of an episode that is cancelled or has failed. Then its process is killed."""
    max_concurrent: Layout[PositiveInt | None] = None
    """Limit of a worker's episodes at once; None is twice `rollout.max_concurrent_sequences`. One that waits for a tool uses no
    sequence."""
    max_processes: Layout[PositiveInt] = 4
    """Processes of a synchronous environment (`def`) on each worker: that many of its episodes run at once. Asynchronous ones share one."""
    max_memory_bytes: Resources[PositiveInt] = 8 * 1024**3
    """Memory limit of each process of an environment and of each process that it starts."""
    env: Resources[tuple[str, ...]] = ()
    """Environment variables that environments see, by name, as `reward.env` for judges."""

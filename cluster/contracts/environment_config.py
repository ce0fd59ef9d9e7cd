"""What speaks with the policy, and how long an episode may take."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from cluster.contracts.plugins import Plugin
from cluster.contracts.settings import Layout, Mathematics, Resources, Section

SINGLE_TURN = Plugin(name="single_turn")


class EpisodesConfig(Section):
    """Of environments other than `single_turn`."""

    column: Mathematics[str] = "environment"
    """The prompt's column that names one of `environments`."""
    max_turns: Mathematics[PositiveInt] = 16
    """Of the model in one episode, tool calls included. An episode that asks for more ends as `length`, with what it has earned."""
    on_turn_length: Mathematics[Literal["end", "continue"]] = "end"
    """What a turn that was cut off at its token limit is. `end`: the model's last one; the environment may still return a reward.
    `continue`: its close is written for it, and the episode goes on."""
    history: Mathematics[Literal["append", "template"]] = "append"
    """What the model sees of earlier turns. `append`: the tokens that it sampled and that it was given, as they were. `template`: where
    the chat template writes the conversation otherwise by now, as it does where it drops earlier reasoning, the episode goes on in a new
    segment that begins with that: what a server that keeps no tokens shows it, at the price of more rows."""
    parser: Mathematics[Plugin | None] = None
    """Reads tool calls in what the model said, where neither the tokenizer's response template nor one made from the chat template passes
    the proof: `{name: vllm, parser: hermes, tokenizer: PATH}`, or a function of yours as 'my_package.module:name' with the parameters
    `text`, without the token that ended the turn, and `tools`, which returns the words and the calls. None takes the one that is proven."""
    compared_share: Resources[Annotated[float, Field(ge=0, le=1)]] = 0.01
    """Share of episodes whose prompts are held against what the chat template writes of the whole conversation, turn by turn:
    `environment/<name>/uncanonical_share` says how many differ."""
    timeout_s: Resources[PositiveFloat] = 300.0
    """Of a whole episode. One that takes longer has failed, and has no reward."""
    cleanup_s: Resources[PositiveFloat] = 5.0
    """For `finally` and `async with` of an episode that is cancelled or has failed; then its process is killed."""
    max_concurrent: Layout[PositiveInt | None] = None
    """Episodes that a worker has under way; None is twice `rollout.max_concurrent_sequences`. Those that wait for a tool hold no place in
    the engine."""
    max_processes: Layout[PositiveInt] = 4
    """Of a synchronous environment (`def`), for each worker: that many of its episodes run at once. Asynchronous ones share one."""
    max_memory_bytes: Resources[PositiveInt] = 8 * 1024**3
    """Of each process of an environment, and of each that it starts."""
    env: Resources[tuple[str, ...]] = ()
    """Environment variables that environments see, as `reward.env` for judges."""

"""Tools for the model, and the reward of an episode with them."""

import math
import re

from treadwheel import Episode, EpisodeOver, ToolError, tool


@tool(timeout_s=5)
def calculate(expression: str) -> str:
    """Product of whole numbers, such as 12 * 34."""
    # The model reads this docstring and the types. It gets a ToolError as the answer; any other error is a failure of the environment.
    try:
        return str(math.prod(int(factor) for factor in expression.split("*")))
    except ValueError as error:
        raise ToolError("whole numbers with * between them, and nothing else") from error


async def with_multiplication(episode: Episode, *, price: float = 0.0) -> float:
    """1 for the right number in the model's last reply, less `price` for each call."""
    try:
        said = await episode.ask(tools=[calculate])  # answers calls, and returns the first reply without one
        number = re.search(r"-?\d+", said.text)
        is_right = number is not None and number[0] == str(episode.columns["answer"])
    except EpisodeOver:  # at a limit calls cost too: else calling without end would pay more than a wrong answer
        is_right = False
    episode.log("called", float(episode.num_calls > 0))
    return float(is_right) - price * episode.num_calls

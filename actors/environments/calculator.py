"""Arithmetic with a calculator: a model that cannot multiply learns to call the tool."""

import ast
import dataclasses
import operator
from collections.abc import Callable
from random import Random
from typing import Literal

from pydantic import NonNegativeFloat

from actors.environments.numbers import first_number
from cluster.contracts.episodes import Episode
from cluster.contracts.errors import DataError, EpisodeOver, ToolError
from cluster.contracts.tools import Tool, tool

_MAX_LENGTH = 100
"""Characters of an expression. Bounds the size of its value and the nesting of its parentheses."""
_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


@tool(timeout_s=5)
def calculate(expression: str) -> str:
    """Value of whole numbers with + - * and parentheses."""
    if len(expression) > _MAX_LENGTH:
        raise ToolError(f"an expression has at most {_MAX_LENGTH} characters")
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError) as error:
        raise ToolError("no expression of whole numbers with + - * and parentheses") from error


async def calculator(
    episode: Episode, *, price: NonNegativeFloat = 0.0, tool: Literal["working", "broken"] = "working"
) -> float:
    """Pays 1 if the first number in the model's last message equals the prompt's column `answer`, minus `price` for each call of the
    calculator. Metrics: `called`, the share of episodes with a call; `right`, the share with the right number.

    `tool: broken` is the control experiment: the calculator returns random numbers, so a call costs `price` and gains nothing.
    """
    if "answer" not in episode.columns:
        raise DataError("calculator needs a column `answer` with the right number; give the prompts one")
    try:
        said = await episode.ask(tools=[calculate if tool == "working" else _broken(episode.seed)])
        is_right = first_number(said.text) == int(episode.columns["answer"])
    except EpisodeOver:
        # Calls cost here too: else an episode of calls alone would pay more than a wrong answer.
        is_right = False
    episode.log("called", float(episode.num_calls > 0))
    episode.log("right", float(is_right))
    return float(is_right) - price * episode.num_calls


def _broken(seed: int) -> Tool:
    """A tool that the model cannot tell from `calculate` by its schema."""
    rng = Random(seed)
    return dataclasses.replace(calculate, call=lambda expression: str(rng.randint(10_000, 999_999)))


def _value(node: ast.expr) -> int:
    """Raises ValueError for anything but plain arithmetic."""
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left), _value(right))
        case _:
            raise ValueError(ast.dump(node))

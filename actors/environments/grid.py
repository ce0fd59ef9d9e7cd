"""A walk over a grid with holes to a goal. Every step has its own reward."""

from collections.abc import Collection
from dataclasses import dataclass
from random import Random

from pydantic import PositiveInt

from cluster.contracts.episodes import Episode

SIDE, NUM_HOLES = 4, 3
START, GOAL = (0, 0), (SIDE - 1, SIDE - 1)
"""Cells are (row, column), from the upper left."""
STEPS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
NEARER = 0.1

Cell = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    distances: dict[Cell, int]
    """Steps to the goal around the holes, for each cell that can reach it."""
    holes: frozenset[Cell]

    def drawn(self, place: Cell) -> str:
        """One line a row: `A` is `place`, `O` a hole, `G` the goal."""
        marks = dict.fromkeys(self.holes, "O") | {GOAL: "G", place: "A"}
        return "\n".join("".join(marks.get((row, column), ".") for column in range(SIDE)) for row in range(SIDE))


def make_grid(seed: int) -> Grid:
    """Draws holes until the start can reach the goal."""
    rng = Random(seed)
    cells = [(row, column) for row in range(SIDE) for column in range(SIDE) if (row, column) not in (START, GOAL)]
    while True:
        holes = frozenset(rng.sample(cells, NUM_HOLES))
        distances = _distances(holes)
        if START in distances:
            return Grid(distances=distances, holes=holes)


def step_from(place: Cell, word: str) -> Cell:
    """The cell after a step. A step over the edge and an unknown word leave the place unchanged."""
    down, right = STEPS.get(word, (0, 0))
    row, column = place[0] + down, place[1] + right
    return (row, column) if 0 <= row < SIDE and 0 <= column < SIDE else place


async def grid(episode: Episode, *, turns: PositiveInt = 10) -> float:
    """A walk of at most `turns` steps from the upper left to the goal at the lower right. Each step is one word: up, down, left or right.
    The task's seed decides the grid, which is shown before each step.

    A step toward the goal earns 0.1, a step away from it -0.1, and reaching the goal 1 more. A step into a hole ends the walk and earns
    nothing. Metric: `arrived`, the share of episodes that reached the goal.
    """
    world, place = make_grid(episode.seed), START
    for _ in range(turns):
        word = (await episode.ask(world.drawn(place))).text.strip().lower()
        before, place = place, step_from(place, word)
        if place in world.holes:
            break
        episode.earn(NEARER * (world.distances[before] - world.distances[place]) + (place == GOAL))
        if place == GOAL:
            break
    episode.log("arrived", float(place == GOAL))
    return 0.0


def _distances(holes: Collection[Cell]) -> dict[Cell, int]:
    found, edge = {GOAL: 0}, [GOAL]
    while edge:
        place = edge.pop(0)
        for word in STEPS:
            reached = step_from(place, word)
            if reached not in holes and reached not in found:
                found[reached] = found[place] + 1
                edge.append(reached)
    return found

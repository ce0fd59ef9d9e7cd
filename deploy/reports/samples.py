"""Completions of the first and the last recorded step, for people. They are not chosen for quality."""

from dataclasses import dataclass

from starlette.exceptions import HTTPException

from cluster.contracts.errors import DataError, StorageError
from cluster.contracts.hiding import hidden
from cluster.contracts.types import mean_of
from cluster.record.recorder import step_of
from cluster.record.run_directory import TRAJECTORIES, RunDirectory
from deploy.viewer.runs import Run
from deploy.viewer.steps import RecordedStep, Trajectory, asked, open_step, recorded_steps

NUM_GROUPS, NUM_COMPLETIONS = 3, 2
"""Groups shown of a step, and completions shown of a group."""
_MOST_CHARACTERS = 1500
_MOST_GROUPS = 256
"""Groups of a step that are searched for prompts of both steps."""
_MOST_BYTES = 64 * 1024**2
"""Largest file of a step that a report reads from an object store, which gives only whole files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    text: str
    reward: float | None
    status: str
    """Why there is no reward; empty if there is one."""
    num_tokens: int
    finish_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    prompt: str
    completions: tuple[Completion, ...]
    mean_reward: float | None
    """Over all completions of the group, shown or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Groups of the first and the last recorded step, or of the only one."""

    steps: tuple[tuple[int, tuple[Group, ...]], ...] = ()
    are_same_prompts: bool = False
    missing: str = ""
    """Why there are no samples; empty if there are some."""


def samples(directory: RunDirectory) -> Samples:
    """The first groups of both steps, in the learner's order. If some prompts are in both steps, the groups of these prompts."""
    run = Run("run", directory)
    try:
        found = recorded_steps(run)
        numbers = list(dict.fromkeys([*found[:1], *found[-1:]]))
        if (size := max((_stored_bytes(directory, number) for number in numbers), default=0)) > _MOST_BYTES:
            why = f"a step's file in the object store has {size / 1024**2:,.0f} MiB; `treadwheel view` shows it"
            return Samples(missing=why)
        opened = [open_step(run, number) for number in numbers]
        prompts = [_prompt_ids(step) for step in opened]
        common = [each for each in prompts[0] if each in prompts[-1]] if len(opened) == 2 else []
        shown = [common or [*tickets] for tickets in prompts]
        steps = tuple(
            (step.step, tuple(_group(step, tickets[each]) for each in named[:NUM_GROUPS]))
            for step, tickets, named in zip(opened, prompts, shown, strict=True)
        )
    except (HTTPException, DataError, StorageError) as error:
        return Samples(missing=error.detail if isinstance(error, HTTPException) else str(error))
    return Samples(steps=steps, are_same_prompts=bool(common), missing="" if steps else "no step is recorded yet")


def _stored_bytes(directory: RunDirectory, step: int) -> int:
    if directory.is_local:
        return 0
    names = (name for name in directory.names(TRAJECTORIES) if step_of(name) == step)
    return sum(directory.size_bytes(f"{TRAJECTORIES}/{name}") or 0 for name in names)


def _prompt_ids(step: RecordedStep) -> dict[str, int]:
    """Ticket by prompt, in the learner's order."""
    tickets: dict[str, int] = {}
    for ticket in step.tickets[:_MOST_GROUPS]:
        tickets.setdefault(step.group(ticket).prompt_id, ticket)
    return tickets


def _group(step: RecordedStep, ticket: int) -> Group:
    group = step.group(ticket)
    texts = step.completions(ticket)
    rewards = [each.reward for each in group.trajectories if each.reward is not None]
    return Group(
        prompt=_cut(asked(*step.prompt(ticket))),
        completions=tuple(_completion(each, texts[each.sample_index]) for each in group.trajectories[:NUM_COMPLETIONS]),
        mean_reward=mean_of(rewards) if rewards else None,
    )


def _completion(trajectory: Trajectory, text: str) -> Completion:
    why = trajectory.reward_message or trajectory.reward_status or "not judged"
    return Completion(
        text=_cut(text),
        reward=trajectory.reward,
        status="" if trajectory.reward is not None else hidden(why).strip().partition("\n")[0][:200],
        num_tokens=trajectory.num_tokens,
        finish_reason=trajectory.finish_reason,
    )


def _cut(text: str) -> str:
    left = len(text) - _MOST_CHARACTERS
    return text if left <= 0 else f"{text[:_MOST_CHARACTERS]}… ({left:,} characters more)"

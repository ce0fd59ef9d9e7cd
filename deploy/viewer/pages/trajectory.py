"""One trajectory, down to the token: the sampler's and the learner's numbers, and which of them were not recorded."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from starlette.requests import Request

from cluster.contracts.errors import DamagedError, DataError, StorageError
from cluster.contracts.learned import Learned, LearnedTrajectory
from deploy.viewer.episodes import conversation
from deploy.viewer.page import page
from deploy.viewer.pages.group import told_of
from deploy.viewer.runs import Run
from deploy.viewer.steps import RecordedStep, open_step
from deploy.viewer.token_texts import TokenTexts, token_texts

_NAMES = {
    "rollout_logprobs": "rollout",
    "reference_logprobs": "reference",
    "token_rewards": "rewards",
    "loss_mask": "mask",
    "policy_versions": "versions",
}
"""Names of columns in the page's data."""
_OTHER = "the record of learning has another completion than the file of trajectories"


def trajectory(run: Run, request: Request) -> dict[str, Any]:
    place = request.path_params
    step = open_step(run, place["step"])
    tokens = TokensOfStep(run, step).of(place["ticket"], place["sample"])
    found = step.group(place["ticket"])
    return {"run": run.name, **told_of(step, found), "sample": place["sample"], "tokens": tokens}


class TokensOfStep:
    """The tokens of a step's trajectories, with the learner's numbers."""

    def __init__(self, run: Run, step: RecordedStep) -> None:
        """Reads the record of learning and the tokenizer, if there are any."""
        self._run = run
        self._step = step
        self._texts, self._why_numbers = _texts_of(run)
        self._learned, self._why_not_learned = _learned_of(run, step)

    def of(self, ticket: int, sample: int) -> dict[str, Any]:
        """Columns by name with one value per token, or None. Numbers that are not finite are text. `missing` has a sentence for each column
        that was not recorded."""
        columns = self._step.tokens(ticket, sample)
        token_ids = columns["completion_token_ids"] or []
        learned = self._learned and self._learned.trajectory(ticket_index=ticket, sample_index=sample)
        is_other = learned is not None and len(learned.policy_logprobs) != len(token_ids)
        if is_other:
            learned = None
        missing = {
            "reference": None if columns["reference_logprobs"] else "not recorded: this run has no reference model",
            "rewards": None if columns["token_rewards"] else "not recorded: the reward is for the whole completion",
            "rollout": None if columns["rollout_logprobs"] else "not recorded: these completions were not sampled here",
            "learned": _OTHER if is_other else None if learned else self._why_not(ticket),
        }
        return {
            "ids": token_ids,
            **_shown(self._texts, token_ids),
            **{short: _words(columns[name]) for name, short in _NAMES.items()},
            "learned": learned and {name: _words(getattr(learned, name)) for name in LearnedTrajectory.__slots__},
            "missing": {name: why for name, why in missing.items() if why},
            "conversation": _conversation(self._step.segments(ticket, sample)),
            "proximal": (self._run.config().get("algorithm") or {}).get("proximal", "rollout"),
            "tokenizer": self._why_numbers,
        }

    def _why_not(self, ticket: int) -> str:
        if self._learned and any(each == ticket for each, _ in self._learned.places):
            return "not recorded: the learner did not reach this trajectory, because its reward failed or the step ended before"
        return self._why_not_learned


def _conversation(segments: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    found = conversation(segments)
    if found is None:
        return None
    blocks = [{**asdict(block), "earned": _word(block.earned)} for block in found.blocks]
    return {"blocks": blocks, "rewrites": [asdict(rewrite) for rewrite in found.rewrites]}


def _learned_of(run: Run, step: RecordedStep) -> tuple[Learned | None, str]:
    """(the record of learning, a sentence for trajectories of groups that are not in it)."""
    try:
        learned = step.learned()
    except (DataError, StorageError) as error:
        return None, str(error)
    asked = (run.config().get("record") or {}).get("learned_groups", 0)
    remedy = f"`treadwheel replay {run.place} --learned {step.step}` writes it"
    if learned:
        return learned, f"not recorded for this group: record.learned_groups={asked}; {remedy} for all"
    if all(line["policy_version"] < step.step for line in run.metrics()[-1:]) and run.state() == "running":
        return None, "not recorded yet: the learner is working on this step"
    return None, f"not recorded{': record.learned_groups=0' if asked == 0 else ''}; {remedy}"


def _shown(texts: TokenTexts | None, token_ids: list[int]) -> dict[str, Any]:
    if texts is None:
        return {"texts": [f"⟨{number}⟩" for number in token_ids], "broken": [], "characters": {}, "special": []}
    return asdict(texts.shown(token_ids))


def _texts_of(run: Run) -> tuple[TokenTexts | None, str | None]:
    """(texts of tokens, why tokens are shown as numbers instead)."""
    try:
        texts = token_texts(run)
    except DamagedError as error:
        return None, f"Tokens are shown as numbers: {error}."
    return texts, None if texts else _not_here(run)


def _not_here(run: Run) -> str:
    model = (run.config().get("model") or {}).get("path")
    return (
        f"The tokenizer of {model} is not on this machine, so tokens are shown as numbers. The viewer looks for it in the run's "
        "checkpoints, in the model's folder (relative to the folder where the viewer was started), and in the hub's cache."
    )


def _words(values: Iterable[Any] | None) -> list[Any] | None:
    """Values with numbers that are not finite as text, since JSON has no such numbers."""
    return None if values is None else [_word(value) for value in values]


def _word(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
    return float(f"{value:.9g}")  # nine digits distinguish all float32 numbers


ROUTES = page(
    "/run/{run}/step/{step:int}/group/{ticket:int}/{sample:int}", trajectory, template="trajectory.html", here="step"
)

"""Every error that treadwheel raises on purpose: one message for people, and facts as attributes for code.

The message names the field or row, the value, and the way out; no code reads it. Errors cross Ray, so they pickle, facts included.
`ConfigError` ends a command with exit code 2, `PreemptedError` with 75.
"""

from enum import StrEnum
from typing import Any


class FailureKind(StrEnum):
    """What happened to an actor, and with it what can be done."""

    DEATH = "death"
    """The process is gone, or its node is."""
    HANG = "hang"
    """No answer, or no progress, within the deadline."""
    ERROR = "error"
    """It raised something that is not one of our deliberate errors."""
    REFUSAL = "refusal"
    """A deliberate error, such as weights that fail attestation: starting again would not change it."""
    LOST = "lost"
    """An argument went with the node that held it: nobody's fault, and it can be made again."""
    TERMINATION = "termination"
    """Its node announced that it goes away."""


class TreadwheelError(Exception):
    """Root of all deliberate errors; catch it at a boundary to tell ours from bugs."""

    kind = FailureKind.REFUSAL
    details: str | None = None

    def __init__(
        self,
        message: str,
        *,
        kind: FailureKind | None = None,
        actor: str | None = None,
        prompt_id: str | None = None,
        stage: str | None = None,
        details: str | None = None,
    ) -> None:
        """`kind` defaults to the class's own. `actor` failed in `stage`, the method that was called; None when no actor was called.
        `details` is what the message is a sentence of: a traceback, or Ray's own words."""
        super().__init__(message)
        if kind is not None:
            self.kind = kind
        if details is not None:
            self.details = details
        self.actor = actor
        self.prompt_id = prompt_id
        self.stage = stage


class ConfigError(TreadwheelError):
    """The user asked for something that cannot work. Raised before anything expensive starts."""


class InUseError(ConfigError):
    """The run directory has a living driver."""


class DataError(TreadwheelError):
    """A trajectory, prompt or file breaks its schema; the message names the row and the field, `prompt_id` the prompt."""


class WeightsError(TreadwheelError):
    """Weights do not match their manifest, or the engine that loaded them does not compute what the learner computes."""


class MismatchError(TreadwheelError):
    """Rollout and learner log-probs disagree beyond the limit that stops a run."""


class StalenessError(TreadwheelError):
    """A token is further off-policy than the bound allows: our own mistake, and never trained on."""


class DeadlineError(TreadwheelError):
    """A wait outlasted its deadline; the message names actor, phase, policy version and last progress."""

    kind = FailureKind.HANG


class WorkerError(TreadwheelError):
    """A worker failed in a way that starting it again may heal; the message names the worker."""

    kind = FailureKind.ERROR


class UnreachableError(WorkerError):
    """A worker's node is dead or does not answer: nothing says that the worker's own work ended it."""

    kind = FailureKind.DEATH


class EngineError(WorkerError):
    """A worker's engine ended, and with it everything that it was sampling."""


class LostError(TreadwheelError):
    """Objects went with the node that held them; they can be made again."""

    kind = FailureKind.LOST


class BroadcastError(TreadwheelError):
    """A process group lost a member in the middle of a broadcast: the others are in order, and get the weights in another group."""

    kind = FailureKind.LOST


class UnavailableError(TreadwheelError):
    """What a judge calls is away: nothing about the completion is known, and asking later may help."""

    def __init__(
        self, message: str, *, endpoint: str | None = None, retry_after_s: float | None = None, **facts: Any
    ) -> None:
        """`endpoint` names it for people: a URL without secrets. `retry_after_s` tells of a limit of rate, which says nothing of what was
        asked: the endpoint's own, or without `endpoint` one that was set here."""
        super().__init__(message, **facts)
        self.endpoint = endpoint
        self.retry_after_s = retry_after_s


class Limit(StrEnum):
    """Of an episode."""

    TURNS = "max_turns"
    """The model has had all its turns."""
    CONTEXT = "context"
    """The next turn does not fit into the model's context."""
    TURN_LENGTH = "turn_length"
    """The last turn was cut off, and such an episode does not go on."""
    DEADLINE = "timeout_s"

    @property
    def is_policys_doing(self) -> bool:
        """Then the episode ends as `length`, with what it earned; else it fails, and has no reward."""
        return self is not Limit.DEADLINE


class EpisodeOver(TreadwheelError):
    """An episode asks beyond its `limit`. An environment may catch it and return a reward, but not beyond the deadline."""

    def __init__(self, message: str, *, limit: Limit = Limit.CONTEXT, **facts: Any) -> None:
        """The default is of the model's side."""
        super().__init__(message, **facts)
        self.limit = limit


class ToolError(TreadwheelError):
    """The model used a tool wrongly: the message goes to the model, and the episode goes on."""


class NumericsError(TreadwheelError):
    """Loss or gradient stayed non-finite for more steps in a row than allowed."""


class CheckpointError(TreadwheelError):
    """A checkpoint is torn, altered or foreign; the message names it and the one before it."""


class StorageError(TreadwheelError):
    """The run directory cannot be read or written (disk full, no permission, in use); the message names the file."""


class DamagedError(StorageError):
    """A file is there, and its content is not what it should be."""


class ClaimLostError(StorageError):
    """Another driver took the run directory over: this one must end."""


class AlreadyExistsError(StorageError):
    """A file that was to be created is there already, with other content."""


class LedgerError(TreadwheelError):
    """The record of consumed groups contradicts itself or the trajectories on disk."""


class PreemptedError(TreadwheelError):
    """A node that the run cannot do without announced its end. The same command goes on elsewhere."""

    kind = FailureKind.TERMINATION

    def __init__(self, message: str, *, deadline: float | None = None, **facts: Any) -> None:
        """`deadline` is the node's end in Unix seconds; None where it does not say."""
        super().__init__(message, **facts)
        self.deadline = deadline


OF_ITS_MACHINE = (ConfigError, StorageError, DataError)
"""What a machine without the model's folder raises, or a hub that does not answer: the same as a wrong setting."""


def failure_of_its_actor(error: TreadwheelError) -> WorkerError | DeadlineError:
    """A deliberate error as a failure of the one actor that raised it: another actor may do better."""
    if isinstance(error, WorkerError | DeadlineError):
        return error
    return WorkerError(str(error), kind=FailureKind.ERROR, actor=error.actor, stage=error.stage, details=error.details)


def headline(error: BaseException) -> str:
    """The first line of its message, or its class's name when it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__)

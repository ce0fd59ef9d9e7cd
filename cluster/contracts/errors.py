"""All errors that treadwheel raises on purpose. Each has one message for people, and facts as attributes for code.

The message names the field or row, its value and the way out; code never reads it. Errors cross Ray, so they can be pickled, facts
included. `ConfigError` ends a command with exit code 2, `PreemptedError` with 75.
"""

from enum import StrEnum
from typing import Any


class FailureKind(StrEnum):
    """The failure of an actor, by which the supervisor decides what to do."""

    DEATH = "death"
    """The process is gone, or its node is."""
    HANG = "hang"
    """No answer or no progress within the deadline."""
    ERROR = "error"
    """The actor raised an error that is not one of ours."""
    REFUSAL = "refusal"
    """A deliberate error, such as weights that fail attestation. A restart would not change it."""
    LOST = "lost"
    """An argument was lost with the node that held it. No actor is at fault, and it can be made again."""
    TERMINATION = "termination"
    """The actor's node announced its end."""


class TreadwheelError(Exception):
    """Base class of all deliberate errors. Catch it at a boundary to tell them from bugs."""

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
        """`kind` defaults to the class's own. `stage` is the method in which `actor` failed; both are None when no actor was called.
        `details` is the long form of the message: a traceback, or Ray's own text."""
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
    """Another driver is using the run directory."""


class DataError(TreadwheelError):
    """A trajectory, prompt or file breaks its schema. The message names the row and the field, `prompt_id` the prompt."""


class TooLongError(DataError):
    """New messages alone do not fit into the model's context. That is not the policy's doing."""


class WeightsError(TreadwheelError):
    """Weights do not match their manifest, or the engine that loaded them does not compute what the learner computes."""


class MismatchError(TreadwheelError):
    """Rollout and learner log-probs differ by more than the limit that stops a run."""


class StalenessError(TreadwheelError):
    """A token is further off-policy than the bound allows. This is a bug in treadwheel; such a token is never trained on."""


class DeadlineError(TreadwheelError):
    """A wait exceeded its deadline. The message names actor, phase, policy version and last progress."""

    kind = FailureKind.HANG


class WorkerError(TreadwheelError):
    """A worker failed in a way that a restart may heal. The message names the worker."""

    kind = FailureKind.ERROR


class UnreachableError(WorkerError):
    """A worker's node is dead or does not answer. The worker's own work is not known to be the cause."""

    kind = FailureKind.DEATH


class EngineError(WorkerError):
    """A worker's engine died, and with it all requests that it was sampling."""


class LostError(TreadwheelError):
    """Objects were lost with the node that held them. They can be made again."""

    kind = FailureKind.LOST


class BroadcastError(TreadwheelError):
    """A process group lost a member during a broadcast. The other members are in order and receive the weights in another group."""

    kind = FailureKind.LOST


class UnavailableError(TreadwheelError):
    """A service that a judge calls is unavailable. Nothing is known about the completion, and a later try may succeed."""

    def __init__(
        self, message: str, *, endpoint: str | None = None, retry_after_s: float | None = None, **facts: Any
    ) -> None:
        """`endpoint` is the service's URL without secrets. `retry_after_s` is set for a rate limit, which does not depend on the question:
        the endpoint's own limit, or without `endpoint` a limit that was set here."""
        super().__init__(message, **facts)
        self.endpoint = endpoint
        self.retry_after_s = retry_after_s


class Limit(StrEnum):
    """Limits of an episode."""

    TURNS = "max_turns"
    """The model has had all of its turns."""
    CONTEXT = "context"
    """The next turn does not fit into the model's context."""
    TURN_LENGTH = "turn_length"
    """The last turn was truncated, and `episodes.on_turn_length` ends such an episode."""
    DEADLINE = "timeout_s"

    @property
    def is_policys_doing(self) -> bool:
        """If so, the episode ends as `length` and keeps what it earned. Otherwise it fails and has no reward."""
        return self is not Limit.DEADLINE


class EpisodeOver(TreadwheelError):
    """The episode asked for more than its `limit` allows. An environment may catch this and return a reward, except after the deadline."""

    def __init__(self, message: str, *, limit: Limit = Limit.CONTEXT, **facts: Any) -> None:
        """The model's side raises it with the default limit."""
        super().__init__(message, **facts)
        self.limit = limit


class ToolError(TreadwheelError):
    """The model used a tool wrongly. The message goes to the model, and the episode continues."""


class NumericsError(TreadwheelError):
    """Loss or gradient was not finite for more consecutive updates than allowed."""


class CheckpointError(TreadwheelError):
    """A checkpoint is torn, altered or foreign. The message names it and the previous one."""


class StorageError(TreadwheelError):
    """The run directory cannot be read or written (disk full, no permission, in use). The message names the file."""


class DamagedError(StorageError):
    """A file exists, but its content is damaged."""


class ClaimLostError(StorageError):
    """Another driver has taken over the run directory. This one must end."""


class AlreadyExistsError(StorageError):
    """A file that was to be created exists with other content."""


class LedgerError(TreadwheelError):
    """The record of consumed groups contradicts itself or the trajectories on disk."""


class PreemptedError(TreadwheelError):
    """A node that the run cannot do without announced its end. The same command resumes the run elsewhere."""

    kind = FailureKind.TERMINATION

    def __init__(self, message: str, *, deadline: float | None = None, **facts: Any) -> None:
        """`deadline` is the node's end in Unix seconds; None if it is not known."""
        super().__init__(message, **facts)
        self.deadline = deadline


OF_ITS_MACHINE = (ConfigError, StorageError, DataError)
"""Errors of a wrong setting, which a machine without the model's folder, or without access to the hub, raises too."""


def failure_of_its_actor(error: TreadwheelError) -> WorkerError | DeadlineError:
    """A deliberate error as a failure of the actor that raised it: another actor may succeed."""
    if isinstance(error, WorkerError | DeadlineError):
        return error
    return WorkerError(str(error), kind=FailureKind.ERROR, actor=error.actor, stage=error.stage, details=error.details)


def headline(error: BaseException) -> str:
    """The first line of the error's message, or its class's name if the message is empty."""
    return next(iter(str(error).splitlines()), type(error).__name__)

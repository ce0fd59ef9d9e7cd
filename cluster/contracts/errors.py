"""Every error that treadwheel raises on purpose. One message each, no custom `__init__`: they cross Ray, so they pickle.

The message names the field or row, the value, and the way out. `ConfigError` ends a command with exit code 2.
"""


class TreadwheelError(Exception):
    """Root of all deliberate errors; catch it at a boundary to tell ours from bugs."""


class ConfigError(TreadwheelError):
    """The user asked for something that cannot work. Raised before anything expensive starts."""


class DataError(TreadwheelError):
    """A trajectory, prompt or file breaks its schema; the message names the row and the field."""


class WeightsError(TreadwheelError):
    """Weights do not match their manifest, or the engine that loaded them does not compute what the learner computes."""


class MismatchError(TreadwheelError):
    """Rollout and learner log-probs disagree beyond the limit that stops a run."""


class StalenessError(TreadwheelError):
    """A token is further off-policy than the bound allows: our own mistake, and never trained on."""


class DeadlineError(TreadwheelError):
    """A wait outlasted its deadline; the message names actor, phase, policy version and last progress."""


class WorkerError(TreadwheelError):
    """A worker failed in a way that starting it again may heal; the message names the worker."""


class LostError(TreadwheelError):
    """Objects went with the node that held them; whoever made them makes them again."""


class NumericsError(TreadwheelError):
    """Loss or gradient stayed non-finite for more steps in a row than allowed."""


class CheckpointError(TreadwheelError):
    """A checkpoint is torn, altered or foreign; the message names it and the one before it."""


class StorageError(TreadwheelError):
    """The run directory cannot be read or written (disk full, no permission, in use); the message names the file."""


class LedgerError(TreadwheelError):
    """The record of consumed groups contradicts itself or the trajectories on disk."""

"""The nouns. Frozen, keyword-only, stdlib only; whatever travels between actors is one of these or an Arrow batch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import mean
from typing import TYPE_CHECKING, Any, Literal

from cluster.contracts.errors import TreadwheelError

if TYPE_CHECKING:
    from cluster.contracts.sampling_config import SamplingConfig


class ActorKind(StrEnum):
    ROLLOUT_WORKER = "rollout_worker"
    REWARD_SERVICE = "reward_service"
    REFERENCE_SCORER = "reference_scorer"
    REWARD_MODEL = "reward_model"
    JUDGE_SERVER = "judge_server"
    LEARNER = "learner"
    RECORDER = "recorder"


class FinishReason(StrEnum):
    STOP = "stop"
    """An end-of-sequence token or a stop string."""
    LENGTH = "length"
    """The token limit: the completion is truncated."""
    ABORTED = "aborted"
    """Given up, never trained on."""


class RewardStatus(StrEnum):
    OK = "ok"
    ERROR = "error"
    """The reward raised. Not a zero: counted, quarantined, never trained on."""
    TIMEOUT = "timeout"
    """The reward overran its deadline. Not a zero either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One task for the policy, as a prompt source yields it."""

    prompt_id: str
    """Stable across runs and machines: the source's name and the row's index or seed."""
    messages: list[dict[str, Any]] | None = None
    """Chat messages, for the model's chat template."""
    text: str | None = None
    """Plain text, which no template changes. With `messages` too, a model that has a chat template gets these, any other one the text."""
    columns: dict[str, Any] = field(default_factory=dict[str, Any])
    """Everything else the source knows (answer, metadata), JSON-able; handed to the reward untouched."""

    def info(self) -> dict[str, Any]:
        """What travels with its trajectories: the columns, and under `messages` its messages and nothing else: a column of that name is a
        conversation that the policy did not see."""
        columns = {name: value for name, value in self.columns.items() if name != "messages"}
        return columns if self.messages is None else {"messages": self.messages, **columns}


_BEFORE_ALL = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """The right to start one group, handed out in order. Results are taken in this order, never as they finish."""

    index: int
    """Place in the run's start order, from 0; never used twice."""
    prompt: Prompt
    num_trajectories: int
    """How many make the group."""
    num_extra_trajectories: int = 0
    """Started beside them: the group is made of those that end first, and the others are given up."""
    seed: int
    """Seed of the group; sample i uses `sample_seed(seed, i)`, so nothing depends on which worker samples."""
    policy_version: int
    """Newest attested version when the ticket was issued."""
    sampling: "SamplingConfig"

    @property
    def group_id(self) -> str:
        return f"{self.index:08d}"

    @property
    def place(self) -> int:
        """In a line: held-out groups (negative indices) first, then in the order in which the learner takes them."""
        return self.index if self.index >= 0 else abs(self.index) - _BEFORE_ALL


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine sampled for one request."""

    token_ids: list[int]
    rollout_logprobs: list[float]
    """Natural log, one per token, under the weights that sampled it and after temperature; never recomputed."""
    policy_versions: list[int]
    """One per token: an in-flight update can change the version inside a completion."""
    finish_reason: FinishReason
    routed_experts: bytes | None = None
    """As `EngineOutput.routed_experts`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """One trajectory's judgement. `value` is None unless `status` is ok."""

    value: float | None
    status: RewardStatus = RewardStatus.OK
    components: dict[str, float | None] = field(default_factory=dict[str, float | None])
    """None: this trajectory does not have it."""
    message: str | None = None
    """Why it failed, for events and the quarantine; None when ok."""


PART_LEFT = "part left"
"""Kind of a failure that left the reward known, without one of its parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFailure:
    """Trajectories of one group whose rewards failed in one way."""

    kind: str
    """The type of the judge's exception, after its stage where the reward has parts (`judge:style KeyError`); `timeout` for those that
    overran their deadline, `PART_LEFT`."""
    message: str
    """Of the first of them, on one line."""
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStats:
    """What judging one group took of one part of the reward."""

    seconds: float
    num_failed: int
    """Trajectories for which the part failed, whether it left the recipe or not."""
    verdicts: Mapping[str, str] = field(default_factory=dict[str, str])
    """To keep, by the digest of what was asked: JSON of [value, components] of each trajectory of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeStats:
    """What the episodes of one group did, in sums over them."""

    environment: str
    num_episodes: int
    num_turns: int
    """Of the model."""
    num_calls: int
    """Of tools."""
    num_malformed_calls: int
    num_compared_turns: int = 0
    """Whose prompts were held against what the template writes."""
    num_uncanonical_turns: int = 0
    """Of these, those that the template would write otherwise."""
    num_sampled_tokens: int
    num_written_tokens: int
    """Between turns: by the template, tools and the environment."""
    written_by_role: Mapping[str, int] = field(default_factory=dict[str, int])
    """The same, by the role of the last message before a turn; empty for a record that does not tell it."""
    num_retries: int = 0
    """Times that one of them began anew, since a process of the environment died."""
    failed_stages: Mapping[str, int] = field(default_factory=dict[str, int])
    """How many failed, by stage."""
    logs: Mapping[str, tuple[float, ...]] = field(default_factory=dict[str, tuple[float, ...]])
    """Numbers that the environment logged, by name: one of each episode that did."""
    seconds: float
    """From start to end."""
    model_seconds: float
    """Of these, those in which the model spoke or was waited for."""


Scores = dict[str, dict[str, float] | str]
"""Of one trajectory, by reward model: the score of every label, or why there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """What the controller knows of a group whose trajectories stay in the object store."""

    group_id: str
    prompt_id: str
    num_trajectories: int
    num_tokens: int
    """Completion tokens sampled."""
    size_bytes: int
    oldest_versions: tuple[int | None, ...]
    """One per trajectory: the oldest policy version of its trained tokens, of all where none trains; None where it has no token."""
    rewards: tuple[float | None, ...] = ()
    """One per trajectory once scored; None where the reward failed."""
    reward_components: dict[str, tuple[float | None, ...]] = field(default_factory=dict[str, tuple[float | None, ...]])
    """By name, one per trajectory; None where the judge returned none of that name."""
    num_reward_errors: int = 0
    num_reward_timeouts: int = 0
    reward_failures: tuple[RewardFailure, ...] = ()
    """Why rewards failed, the most frequent way first; the rare ways of a long list are left out, and still counted above."""
    part_stats: dict[str, PartStats] = field(default_factory=dict[str, PartStats])
    """By part, as it was judged; empty for a group that is read from its record. The name of the only judge is empty."""
    completion_lengths: tuple[int, ...] = ()
    """Completion tokens, one per trajectory; of an episode those of its environment too."""
    sampled_lengths: tuple[int, ...] = ()
    """Those that were sampled; `num_tokens` are all of them."""
    truncated: tuple[bool, ...] = ()
    """One per trajectory."""
    episodes: EpisodeStats | None = None
    """As they were sampled, those that failed among them; None for single turns."""
    is_chosen: bool = False
    """Of trajectories that `algorithm.selection` chose: how many rewards failed before, it does not tell."""

    @property
    def min_policy_version(self) -> int:
        """The staleness bound is measured against it. Of a group with at least one token, as each that trains has."""
        return min(version for version in self.oldest_versions if version is not None)

    @property
    def known_rewards(self) -> tuple[float, ...]:
        """Without those that failed."""
        return tuple(value for value in self.rewards if value is not None)

    @property
    def num_failed_rewards(self) -> int:
        return self.num_reward_errors + self.num_reward_timeouts

    def of(self, rows: Sequence[int]) -> "GroupSummary":
        """Of these trajectories alone, with known rewards. The size stays the same: the others stay in the object store."""
        lengths, sampled = (
            tuple(each[row] for row in rows) for each in (self.completion_lengths, self.sampled_lengths)
        )
        return replace(
            self,
            num_trajectories=len(rows),
            num_tokens=sum(sampled),
            oldest_versions=tuple(self.oldest_versions[row] for row in rows),
            rewards=tuple(self.rewards[row] for row in rows),
            reward_components={
                name: tuple(values[row] for row in rows) for name, values in self.reward_components.items()
            },
            num_reward_errors=0,
            num_reward_timeouts=0,
            reward_failures=(),
            completion_lengths=lengths,
            sampled_lengths=sampled,
            truncated=tuple(self.truncated[row] for row in rows),
            is_chosen=True,
        )

    def can_train(self, *, max_failed_share: float) -> bool:
        """Whether enough rewards are known (`buffer.max_failed_share`). One that is left of several has nothing to be compared with: no
        group advantage is defined for it."""
        num_known, num_failed = len(self.known_rewards), self.num_failed_rewards
        is_left_alone = num_known == 1 and num_failed > 0
        return num_known > 0 and not is_left_alone and num_failed <= max_failed_share * self.num_trajectories


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A group that cannot be sampled, whichever worker tries: its prompt does not fit, or does not go through the template."""

    group_id: str
    prompt_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A finished group: where its trajectories are, and what the controller knows of them."""

    pieces: tuple[Any, ...]
    """In this order: the object ref of the batch as it was sampled; then columns that were added to it, large ones as refs, and lists of
    the rows that were chosen. The driver passes them on and fetches none; `schema.joined` makes one batch of them."""
    summary: GroupSummary

    def with_columns(self, columns: Any, added: Mapping[str, Any]) -> "Group":
        """With columns, or a ref of them, of which `schema.added` says this."""
        size_bytes = self.summary.size_bytes + added["size_bytes"]
        summary = replace(self.summary, **{**added, "size_bytes": size_bytes})
        return Group(pieces=(*self.pieces, columns), summary=summary)

    def moved(self, copies: Mapping[Any, Any]) -> "Group":
        """With copies in place of the pieces that they are copies of."""
        return replace(self, pieces=tuple(_copy_or_itself(piece, copies) for piece in self.pieces))

    def of(self, rows: list[int]) -> "Group":
        """These trajectories alone, whose rewards are known."""
        return Group(pieces=(*self.pieces, rows), summary=self.summary.of(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What one optimizer step did."""

    policy_version: int
    """Version after the step."""
    metrics: dict[str, float]
    """Stable names; see docs/metrics.md."""
    num_trajectories: int
    num_trained_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """How an engine's log-probs of the probe compare with the learner's; all in nats."""

    canary_mean_error: float
    canary_max_error: float
    tolerance: float
    """Of the mean error: beyond it the engine is refused."""
    noise_floor: float
    """The mean error under the files that engine and learner started from: what is noise of this model, type and hardware."""
    distinguishable: bool
    """False when the version is so near to the one before that noise could hide the difference: the proof then shows no step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attestation(Proof):
    """A worker's proof that it serves a version."""

    worker: str
    policy_version: int
    digest: str
    """Of the bytes that it loaded."""
    seconds: float
    pause_seconds: float
    """How long sampling stood still for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastStats:
    """What one broadcast did."""

    policy_version: int
    digest: str
    size_bytes: int
    """Of the whole weights."""
    seconds: float
    """From asking the learner to the last worker's proof; of `publish` or `deliver` alone, that part."""
    attestations: tuple[Attestation, ...]
    publish_seconds: float = 0.0
    """Of these, until the learner had published everything."""
    failures: tuple[tuple[str, TreadwheelError], ...] = ()
    """Names of the workers that did not prove the version, and why. They serve nothing."""
    sent_bytes: int | None = None
    """To all workers that proved the version together; None where each got the whole weights."""
    changed_share: float | None = None
    """Of the elements of the weights, since the version before; None where that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Weights that the learner's first rank keeps, to send them to rank groups; `policy_version`, `digest` and `total_bytes` are their
    manifest's."""

    policy_version: int
    digest: str
    total_bytes: int
    sender: str
    """Of that rank's process: another one has nothing of these."""
    address: str
    """host:port of the store where the members of a group find each other; the sender listens there."""
    backend: Literal["gloo", "nccl"]
    receivers_per_worker: int
    """Processes of a rollout worker's engine."""
    delta: Mapping[str, Any] | None = None
    """What their manifest says of the changes, which are kept as well; None: there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """A process group, and its next broadcast. The learner's first rank is rank 0 and sends, engines' processes receive. Other members are
    another group."""

    name: str
    size: int
    sender: str
    address: str
    backend: Literal["gloo", "nccl"]
    timeout_s: float
    """How long a broadcast may take a member, the wait for the others included."""
    lasts: bool
    """Until a member leaves; else for one broadcast."""
    digest: str
    """Of the weights that are sent."""
    base_digest: str | None = None
    """Of those that all receivers have: what changed since them is sent. None: the whole is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """A part of the reward whose calls wait, because what they need is away."""

    part: str
    """Empty for the only judge of a reward without parts."""
    endpoint: str
    since: float
    """Unix seconds of the first failure."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUse:
    """How full an engine is."""

    num_running: int = 0
    num_waiting: int = 0
    """Requests that it was given and does not run: the cache has no room for them."""
    cache_share: float = 0.0
    """Of the key-value cache, the share that running requests take."""

    def most(self, other: "EngineUse") -> "EngineUse":
        """The larger of each."""
        return EngineUse(
            num_running=max(self.num_running, other.num_running),
            num_waiting=max(self.num_waiting, other.num_waiting),
            cache_share=max(self.cache_share, other.cache_share),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """What code of a user's printed in an actor."""

    lines: tuple[str, ...] = ()
    """The last few."""
    num_lines: int = 0
    """Since the actor began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What an actor is doing now, for deadlines and `treadwheel info`."""

    actor: str
    phase: str
    policy_version: int
    since: float
    """Unix seconds when the phase began."""
    last_progress: float
    """Unix seconds when the actor last moved forward (an engine step, a micro-batch)."""
    pid: int
    detail: str = ""
    holds: tuple[Hold, ...] = ()
    engine: EngineUse | None = None
    """The most under the weights that it serves and those before; None for actors without an engine."""
    printed: Printed = Printed()


def _copy_or_itself(piece: Any, copies: Mapping[Any, Any]) -> Any:
    """Lists of rows and small columns travel with the group, and are no keys."""
    try:
        return copies.get(piece, piece)
    except TypeError:
        return piece


def mean_of(values: Sequence[float]) -> float:
    """Of one number at least, the same in whatever order they come; also of the largest ones, whose sum is none."""
    try:
        return math.fsum(values) / len(values)
    except (OverflowError, ValueError):  # ValueError: infinity and its opposite
        return mean(values)


def is_success(reward: float, *, at: float) -> bool:
    """Whether the reward is `at` or more, as the run file adds it up: 0.7 + 0.29 + 0.01 are a bit less than 1 in floating point, and what
    the steps of an episode earned is kept with 7 digits."""
    return reward >= at - 1e-6 * abs(at)


def sample_seed(group_seed: int, sample_index: int) -> int:
    """Seed of one sample, 31 bits: a function of the group's seed and the sample's place alone."""
    mixed = (group_seed * 0x9E3779B97F4A7C15 + (sample_index + 1) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed ^= mixed >> 31
    mixed = (mixed * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 29)) & 0x7FFFFFFF

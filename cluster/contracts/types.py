"""The nouns: frozen, keyword-only, stdlib only. Only these and Arrow batches travel between actors."""

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
    """Stopped before its end; never trained on."""


class RewardStatus(StrEnum):
    OK = "ok"
    ERROR = "error"
    """The judge or the episode raised an error. Not a zero reward: counted, quarantined, never trained on."""
    TIMEOUT = "timeout"
    """The judge or the episode missed its deadline. Not a zero reward either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One task for the policy, from a prompt source."""

    prompt_id: str
    """Stable across runs and machines: the source's name and the row's index or seed."""
    messages: list[dict[str, Any]] | None = None
    """Chat messages, for the model's chat template."""
    text: str | None = None
    """Plain text, used without a template. With `messages` too, only a model without a chat template gets the text."""
    columns: dict[str, Any] = field(default_factory=dict[str, Any])
    """All other data of the source (answer, metadata), JSON-able; passed to the judges unchanged."""

    def info(self) -> dict[str, Any]:
        """Data that trajectories carry: the columns, and the messages as `messages`. A column of that name is left out, since it is a
        conversation that the policy did not see."""
        columns = {name: value for name, value in self.columns.items() if name != "messages"}
        return columns if self.messages is None else {"messages": self.messages, **columns}


_BEFORE_ALL = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """The right to start one group. Tickets are issued in order, and results are taken in this order, never as they finish."""

    index: int
    """Place in the run's start order, from 0; never used twice."""
    prompt: Prompt
    num_trajectories: int
    """Size of the group."""
    num_extra_trajectories: int = 0
    """Started in addition. The first to finish form the group; the others are aborted."""
    seed: int
    """Seed of the group. Sample i uses `sample_seed(seed, i)`, whichever worker samples it."""
    policy_version: int
    """Newest attested version when the ticket was issued."""
    sampling: "SamplingConfig"

    @property
    def group_id(self) -> str:
        return f"{self.index:08d}"

    @property
    def place(self) -> int:
        """Place in a queue: held-out groups (negative indices) first, then in the order in which the learner takes them."""
        return self.index if self.index >= 0 else abs(self.index) - _BEFORE_ALL


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The result of one request to an engine."""

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
    """The reward of one trajectory. `value` is None unless `status` is ok."""

    value: float | None
    status: RewardStatus = RewardStatus.OK
    components: dict[str, float | None] = field(default_factory=dict[str, float | None])
    """A value of None: this trajectory does not have the component."""
    message: str | None = None
    """Why the reward failed, for events and the quarantine; None when ok."""


PART_LEFT = "part left"
"""Kind of a failure that left out a part of the reward, which is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFailure:
    """Trajectories of one group whose rewards failed in one way."""

    kind: str
    """Type of the judge's exception, after its stage if the reward has parts (`judge:style KeyError`); `timeout`; or `PART_LEFT`."""
    message: str
    """Message of the first failure, on one line."""
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStats:
    """Statistics of one reward part for one group."""

    seconds: float
    num_failed: int
    """Trajectories for which the part failed, whether or not it was left out."""
    verdicts: Mapping[str, str] = field(default_factory=dict[str, str])
    """Verdicts to keep, by the digest of the question: JSON of [value, components] of each trajectory of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeStats:
    """Statistics of one episode."""

    environment: str
    num_turns: int
    """Turns of the model."""
    num_calls: int
    """Tool calls."""
    num_malformed_calls: int
    num_compared_turns: int = 0
    """Turns whose prompts were compared with the template's rendering."""
    num_uncanonical_turns: int = 0
    """Compared turns that the template would render differently."""
    num_sampled_tokens: int
    num_written_tokens: int
    """Tokens between turns, written by the template, tools and the environment."""
    written_by_role: Mapping[str, int] = field(default_factory=dict[str, int])
    """The same, by the role of the last message before a turn; empty if the record does not have it."""
    num_retries: int = 0
    """Times that the episode began anew because a process of the environment died."""
    failed_stage: str | None = None
    """The stage in which it failed; None if it did not."""
    log: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers that the environment logged, by name."""
    seconds: float
    """Seconds from start to end."""
    model_seconds: float
    """Seconds in which the model sampled or was waited for."""


Scores = dict[str, dict[str, float] | str]
"""For one trajectory, by reward model: the score of every label, or why there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """The facts about a group that the controller has. The trajectories stay in the object store."""

    group_id: str
    prompt_id: str
    num_trajectories: int
    num_tokens: int
    """Sampled completion tokens."""
    size_bytes: int
    oldest_versions: tuple[int | None, ...]
    """For each trajectory, the oldest policy version of its tokens that train, or of all tokens if none trains; None without tokens."""
    rewards: tuple[float | None, ...] = ()
    """For each trajectory, once judged; None if the reward failed."""
    reward_components: dict[str, tuple[float | None, ...]] = field(default_factory=dict[str, tuple[float | None, ...]])
    """Name to the values of all trajectories; None where the judge returned none."""
    num_reward_errors: int = 0
    num_reward_timeouts: int = 0
    reward_failures: tuple[RewardFailure, ...] = ()
    """Failures of rewards, the most frequent kind first. Of many kinds the rare ones are left out, but counted above."""
    part_stats: dict[str, PartStats] = field(default_factory=dict[str, PartStats])
    """Part to its statistics; empty for a group that is read from its record. The name of an only judge is empty."""
    completion_lengths: tuple[int, ...] = ()
    """Completion tokens of each trajectory, those of an environment included."""
    sampled_lengths: tuple[int, ...] = ()
    """Sampled tokens of each trajectory; `num_tokens` is their sum."""
    truncated: tuple[bool, ...] = ()
    """For each trajectory."""
    episodes: tuple[EpisodeStats | None, ...] = ()
    """For each trajectory, the statistics of its episode, also of one that failed; empty for single turns."""
    is_chosen: bool = False
    """Whether `algorithm.selection` chose these trajectories. The rewards that failed before the choice are then not counted here."""

    @property
    def min_policy_version(self) -> int:
        """Version that the staleness bound applies to. The group has at least one token, as every group that trains."""
        return min(version for version in self.oldest_versions if version is not None)

    @property
    def known_rewards(self) -> tuple[float, ...]:
        """Rewards that did not fail."""
        return tuple(value for value in self.rewards if value is not None)

    @property
    def num_failed_rewards(self) -> int:
        return self.num_reward_errors + self.num_reward_timeouts

    def of(self, rows: Sequence[int]) -> "GroupSummary":
        """The summary of these trajectories, whose rewards are known. The size stays, since all stay in the object store."""
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
            episodes=tuple(self.episodes[row] for row in rows) if self.episodes else (),
            is_chosen=True,
        )

    def can_train(self, *, max_failed_share: float) -> bool:
        """Whether enough rewards are known (`buffer.max_failed_share`). A single one left of several has no group advantage."""
        num_known, num_failed = len(self.known_rewards), self.num_failed_rewards
        is_left_alone = num_known == 1 and num_failed > 0
        return num_known > 0 and not is_left_alone and num_failed <= max_failed_share * self.num_trajectories


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A group that no worker can sample: its prompt is too long, or the chat template refuses it."""

    group_id: str
    prompt_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A finished group: references to its trajectories, and its summary."""

    pieces: tuple[Any, ...]
    """First the object ref of the sampled batch; then, in order, columns that were added (large ones as refs) and lists of chosen rows. The
    driver passes refs on without fetching them; `schema.joined` makes one batch of all."""
    summary: GroupSummary

    def with_columns(self, columns: Any, added: Mapping[str, Any]) -> "Group":
        """The group with more columns, or a ref of them. `added` is `schema.added` of these columns."""
        size_bytes = self.summary.size_bytes + added["size_bytes"]
        summary = replace(self.summary, **{**added, "size_bytes": size_bytes})
        return Group(pieces=(*self.pieces, columns), summary=summary)

    def moved(self, copies: Mapping[Any, Any]) -> "Group":
        """The group with some pieces replaced by their copies."""
        return replace(self, pieces=tuple(_copy_or_itself(piece, copies) for piece in self.pieces))

    def of(self, rows: list[int]) -> "Group":
        """The group with these trajectories only, whose rewards are known."""
        return Group(pieces=(*self.pieces, rows), summary=self.summary.of(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Results of one step of the learner."""

    policy_version: int
    """Version after the step."""
    metrics: dict[str, float]
    """Stable names; see docs/metrics.md."""
    num_trained_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Comparison of an engine's log-probs of the canary with the learner's, in nats."""

    canary_mean_error: float
    canary_max_error: float
    tolerance: float
    """Largest allowed mean error. Beyond it the engine is refused."""
    noise_floor: float
    """Mean error under the files from which engine and learner started: the noise of this model, compute type and hardware."""
    distinguishable: bool
    """False if the version is so near to the previous one that noise could hide the difference. The proof then does not show the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attestation(Proof):
    """A worker's proof that it serves a version."""

    worker: str
    policy_version: int
    digest: str
    """Digest of the bytes that it loaded."""
    pause_seconds: float
    """Seconds that sampling paused for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastStats:
    """Results of one broadcast."""

    policy_version: int
    digest: str
    size_bytes: int
    """Size of the whole weights."""
    seconds: float
    """Seconds from the request to the learner to the last worker's proof; for `publish` or `deliver` alone, those of that part."""
    attestations: tuple[Attestation, ...]
    publish_seconds: float = 0.0
    """The part of `seconds` until the learner had published everything."""
    failures: tuple[tuple[str, TreadwheelError], ...] = ()
    """Name and error of each worker that did not prove the version. Such a worker serves nothing."""
    sent_bytes: int | None = None
    """Bytes sent to all workers that proved the version; None if each got the whole weights."""
    changed_share: float | None = None
    """Share of the weights' elements that changed since the previous version; None if not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Weights that the learner's first rank keeps for rank groups; with `policy_version`, `digest` and `total_bytes` of their manifest."""

    policy_version: int
    digest: str
    total_bytes: int
    sender: str
    """Id of the process that keeps them. No other process can send them."""
    address: str
    """host:port of the sender's store, at which the members of a group meet."""
    backend: Literal["gloo", "nccl"]
    receivers_per_worker: int
    """Processes of a rollout worker's engine."""
    delta: Mapping[str, Any] | None = None
    """The manifest's entry about the changes, which are kept too; None: no changes are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """A process group and its next broadcast. The learner's first rank is rank 0 and sends; engines' processes receive. Other members make
    another group."""

    name: str
    size: int
    sender: str
    address: str
    backend: Literal["gloo", "nccl"]
    timeout_s: float
    """Longest time of a broadcast for a member, including the wait for the others."""
    lasts: bool
    """Whether the group lasts until a member leaves, or for one broadcast."""
    digest: str
    """Digest of the weights that are sent."""
    base_digest: str | None = None
    """Digest of the weights that all receivers have; only the changes since these are sent. None: the whole weights are sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """A part of the reward whose calls wait because a service that they need is unavailable."""

    part: str
    """Empty for the only judge of a reward without parts."""
    endpoint: str
    since: float
    """Unix seconds of the first failure."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUse:
    """The load of an engine."""

    num_running: int = 0
    num_waiting: int = 0
    """Requests that wait for room in the cache."""
    cache_share: float = 0.0
    """Share of the key-value cache that running requests use."""

    def most(self, other: "EngineUse") -> "EngineUse":
        """The larger value of each field."""
        return EngineUse(
            num_running=max(self.num_running, other.num_running),
            num_waiting=max(self.num_waiting, other.num_waiting),
            cache_share=max(self.cache_share, other.cache_share),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """Lines that user code printed in an actor."""

    lines: tuple[str, ...] = ()
    """The last few lines."""
    num_lines: int = 0
    """Number of lines since the actor began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """An actor's present state, for deadlines and `treadwheel info`."""

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
    """The largest load under the present and the previous weights; None for actors without an engine."""
    printed: Printed = Printed()


def _copy_or_itself(piece: Any, copies: Mapping[Any, Any]) -> Any:
    """Lists of rows and small columns are not refs and cannot be keys."""
    try:
        return copies.get(piece, piece)
    except TypeError:
        return piece


def mean_of(values: Sequence[float]) -> float:
    """Mean of at least one number, independent of their order. It does not overflow where their sum would."""
    try:
        return math.fsum(values) / len(values)
    except (OverflowError, ValueError):  # ValueError: infinities of both signs
        return mean(values)


def is_success(reward: float, *, at: float) -> bool:
    """Whether the reward is at least `at`, within rounding: 0.7 + 0.29 + 0.01 is less than 1 in floating point, and earned rewards have 7
    digits."""
    return reward >= at - 1e-6 * abs(at)


def sample_seed(group_seed: int, sample_index: int) -> int:
    """Seed of one sample, 31 bits. It depends only on the group's seed and the sample's index."""
    mixed = (group_seed * 0x9E3779B97F4A7C15 + (sample_index + 1) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed ^= mixed >> 31
    mixed = (mixed * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 29)) & 0x7FFFFFFF

"""Prometheus's alerts about runs: when each fires, what it means, what to do. docs/monitoring.md and the rule files are made of them."""

from dataclasses import dataclass
from typing import Any, Literal

from deploy.monitoring.series import EVENTS, LAST_STEP_TIME, series

_PAGE = "docs/monitoring.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One rule. Every alert has the label `run`."""

    name: str
    expression: str
    """PromQL; a sample for each run that it is about."""
    lasts: str = "0m"
    """How long it must be so before the alert fires."""
    severity: Literal["critical", "warning", "info"]
    summary: str
    """What is so, of the run `{{ $labels.run }}`."""
    advice: str
    """What to do."""

    def rule(self) -> dict[str, Any]:
        """As Prometheus reads it."""
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": self.lasts,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": f"{{{{ $labels.run }}}}: {self.summary}",
                "description": self.advice,
                "runbook_url": f"{_PAGE}#{self.name.lower()}",
            },
        }


def came(kind: str, *, within: str) -> str:
    """How many events of a kind came within a time, by run, as far as Prometheus saw them come; nothing where none did. Prometheus's own
    `increase` does not see a counter's first event."""
    selected = f'{EVENTS}{{kind="{kind}"}}'
    now, before, first = (
        f"sum by (run, WorkerId) ({each})"
        for each in (selected, f"{selected} offset {within}", f"min_over_time({selected}[{within}])")
    )
    # A counter that was scraped less often than its driver began at none. Another one may be old, and Prometheus was away.
    counted, lived = (
        f"max by (run, WorkerId) (count_over_time({each}[{within}]))" for each in (selected, LAST_STEP_TIME)
    )
    return f"sum by (run) (({now} - ({before} or 0 * ({counted} < {lived}) or {first})) > 0)"


_STILL_S = f"(time() - {series('last_step_time')})"
_ASYNCHRONOUS = f"and on (run) {series('staleness/bound')} > 0"
_SAVED = f'{EVENTS}{{kind="checkpoint"}}'
_HELD, _RESUMED = (f'sum by (run, WorkerId) ({EVENTS}{{kind="reward_{each}"}})' for each in ("held", "resumed"))

ALERTS = (
    Alert(
        name="TreadwheelNoProgress",
        expression=f"{_STILL_S} > 900 unless on (run) {_STILL_S} < 5 * {series('time/step_s')}",
        lasts="2m",
        severity="critical",
        summary="no step for {{ $value | humanizeDuration }}, five times as long as the last one took",
        advice="`treadwheel info RUN_DIR` says what each actor does and since when. A start that loads a large model or waits for nodes "
        "is no fault. Else the driver's log and events.jsonl name the actor that others wait for. The run ends by itself when nothing "
        "has moved for as long as all its deadlines together: `supervision.start_s`, `rollout.timeout_s`, `reward.hold_s` and others.",
    ),
    Alert(
        name="TreadwheelRunEndedAbnormally",
        # The newest driver of the run, unless it said how it ended, and unless one is alive.
        expression=f"max by (run) (topk by (run) (1, max by (run, WorkerId) (max_over_time({LAST_STEP_TIME}[6h]))) "
        # Its head may be gone by then, and with it what it said last.
        f'unless on (run, WorkerId) max_over_time({EVENTS}{{kind=~"finished|stopped"}}[6h])) unless on (run) {LAST_STEP_TIME}',
        lasts="2m",
        severity="critical",
        summary="its driver failed, was killed, or is out of sight, and no other has taken over",
        advice="The last line of events.jsonl says `failed` with the reason, where the driver could still write it. Start the same "
        "command again: it goes on after the last recorded step. Where Prometheus lost the head, mend that. Silent six hours "
        "after the end.",
    ),
    Alert(
        name="TreadwheelLearnerStarved",
        expression=f"{series('buffer/learner_wait_s')} / {series('time/step_s')} > 0.5 {_ASYNCHRONOUS}",
        lasts="30m",
        severity="warning",
        summary="the learner waits for groups in {{ $value | humanizePercentage }} of a step",
        advice="Sampling or judging is too slow for the learner: `treadwheel scale RUN_DIR rollout_workers=N`, a larger "
        "`elastic.max_workers`, shorter completions, or more reward services where judging takes longer than sampling (row Rewards).",
    ),
    Alert(
        name="TreadwheelWorkersMissing",
        expression=f"{series('rollout/num_wanted')} - {series('rollout/num_workers')} > 0",
        lasts="20m",
        severity="warning",
        summary="{{ $value }} rollout workers that should serve do not",
        advice="Event `worker_waits` names those without a node, and what the autoscaler says (quota, stock). `treadwheel info RUN_DIR` "
        "names those that start or load weights. The run goes on with those that serve.",
    ),
    Alert(
        name="TreadwheelWorkerFlapping",
        expression=f"{came('failure', within='30m')} > 3",
        severity="warning",
        summary="actors failed {{ $value }} times in half an hour",
        advice="Events `failure` in events.jsonl name actor, node and reason. One node: take it out. Memory: smaller "
        "`rollout.kv_cache_bytes` or `learner.max_tokens_per_micro_batch`. The run stops by itself when "
        "`supervision.max_restarts` is spent.",
    ),
    Alert(
        name="TreadwheelRewardErrors",
        expression=f"{series('reward/num_errors')} / {series('buffer/num_judged')} > 0.05",
        lasts="10m",
        severity="warning",
        summary="{{ $value | humanizePercentage }} of the trajectories have no reward: their judge raised",
        advice="Events `reward_failure` have the judge's own message. These trajectories do not train; what fails on one kind of answer "
        "biases the run.",
    ),
    Alert(
        name="TreadwheelRewardTimeouts",
        expression=f"{series('reward/num_timeouts')} / {series('buffer/num_judged')} > 0.05",
        lasts="10m",
        severity="warning",
        summary="{{ $value | humanizePercentage }} of the trajectories have no reward: their judge was too slow",
        advice="Raise `reward.timeout_s` or the part's own, make the judge faster, or mend the server that it calls.",
    ),
    Alert(
        name="TreadwheelStalenessAtBound",
        expression=f"{series('staleness/mean')} >= {series('staleness/bound')} {_ASYNCHRONOUS}",
        lasts="30m",
        severity="info",
        summary="all groups are as old as the bound allows, {{ $value }} steps",
        advice="Workers sample faster than the learner learns and then stand idle: fewer of them do, or more processors for the learner."
        " Nothing older than the bound is ever learned from.",
    ),
    Alert(
        name="TreadwheelCanaryNearTolerance",
        expression=f"{series('weights/canary_error')} / {series('weights/canary_tolerance')} > 0.5",
        lasts="10m",
        severity="warning",
        summary="engine and learner differ by {{ $value | humanizePercentage }} of what is tolerated",
        advice="Beyond it workers are refused and replaced. If it rises with the steps, a part of the weights may not arrive: compare "
        "`weights/canary_max_error`. If it was there from the start, the engine is noisier than thought: `rollout.head_dtype: "
        "float32`, or `weights.canary_tolerance`.",
    ),
    Alert(
        name="TreadwheelMismatchRising",
        expression=f"{series('mismatch/mean_abs_nats')} > 0.01 and "
        f"{series('mismatch/mean_abs_nats')} > 2 * avg_over_time({series('mismatch/mean_abs_nats')}[2h:1m] offset 30m)",
        lasts="15m",
        severity="warning",
        summary="rollout and learner log-probs differ by {{ $value | humanize }} nats, twice what they did",
        advice="Off-policy steps are in the difference: look at `mismatch/off_policy_steps`. Without them, a correction "
        "(`algorithm.corrections`) holds the gradient right for a while; `mismatch.stop_nats` ends the run before it learns from "
        "noise.",
    ),
    Alert(
        name="TreadwheelUpdatesSkipped",
        expression=f"{series('learner/skipped_in_a_row')} >= 2",
        severity="critical",
        summary="{{ $value }} updates in a row were skipped: loss or gradient is not finite",
        advice="Nothing is learned, and after `learner.max_non_finite_updates` the run stops. The trajectories of these updates are in the "
        "folder `quarantine` of the run directory. Begin another `run_dir` with a smaller `optimizer.learning_rate` and an earlier "
        "checkpoint's `model` folder as `model.path`.",
    ),
    Alert(
        name="TreadwheelKlRunaway",
        expression=f"{series('learner/kl_old_k3_mean')} > 0.1 or {series('learner/kl_reference_k3_mean')} > 1",
        lasts="10m",
        severity="warning",
        summary="the policy moves by {{ $value | humanize }} nats a token",
        advice="Away from the policy that ratios compare with (0.1) or from the reference (1). Lower the learning rate, set "
        "`learner.stop_at_kl` or a larger `algorithm.kl.loss.coefficient`; read samples: a reward that is gamed looks like this.",
    ),
    Alert(
        name="TreadwheelEntropyCollapse",
        expression=f"{series('learner/entropy_mean')} < 0.1 * max_over_time({series('learner/entropy_mean')}[1d:5m])",
        lasts="15m",
        severity="warning",
        summary="entropy is {{ $value | humanize }} nats a token, a tenth of what it was",
        advice="Groups of equal answers have no advantage, and learning stops. Fine at the end of an easy task; else a higher "
        "`sampling.temperature`, `algorithm.entropy_coefficient`, a wider upper clip of the policy loss, or harder prompts.",
    ),
    Alert(
        name="TreadwheelTruncated",
        expression=f"{series('tokens/truncated_share')} > 0.3",
        lasts="30m",
        severity="warning",
        summary="{{ $value | humanizePercentage }} of the completions are cut off",
        advice="Raise `sampling.max_tokens`, or shape the reward against length; what is cut off is mostly judged wrong.",
    ),
    Alert(
        name="TreadwheelCheckpointStale",
        expression=f"(sum by (run) ({_SAVED}) - sum by (run) ({_SAVED} offset 6h) == 0 "
        f"or max by (run) ({LAST_STEP_TIME} offset 6h) unless on (run) max_over_time({_SAVED}[6h])) "
        f"and on (run) {series('last_step_time')}",
        severity="warning",
        summary="no checkpoint for six hours",
        advice="A crash costs nothing that is recorded, but steps are learned again from the last checkpoint. Lower "
        "`checkpoint.every_steps`, and look for `checkpoint_failed` in events.jsonl.",
    ),
    Alert(
        name="TreadwheelCheckpointFailed",
        expression=came("checkpoint_failed", within="1h"),
        severity="critical",
        summary="a checkpoint was not saved",
        advice="Event `checkpoint_failed` has the reason: a full disk, or an object store that refuses. A run that goes on tries again"
        " at the next step that is due.",
    ),
    Alert(
        name="TreadwheelStorageFailing",
        expression=came("storage_failed", within="1h"),
        severity="critical",
        summary="the run's object store did not take its lines",
        advice="Event `storage_failed` has the store's answer: credentials, rights, network, or a store that is busy. Lines are kept and "
        "written later; the run ends if the store does not take the groups of a step within minutes, and the same command goes on.",
    ),
    Alert(
        name="TreadwheelBufferFull",
        expression=f"{series('buffer/size_bytes')} / {series('buffer/max_size_bytes')} > 0.9",
        lasts="10m",
        severity="warning",
        summary="trajectories fill {{ $value | humanizePercentage }} of what may wait",
        advice="Sampling stops until the learner takes some. Raise `buffer.max_size_bytes` with the nodes' object stores, or lower "
        "`buffer.max_off_policy_steps`.",
    ),
    Alert(
        name="TreadwheelEvaluationRegressed",
        expression=f"max_over_time({series('eval/reward')}[1d:1m]) - {series('eval/reward')} "
        f"> 0.2 * abs(max_over_time({series('eval/reward')}[1d:1m]))",
        lasts="1m",
        severity="warning",
        summary="held-out reward is {{ $value | humanize }} below its best of the day",
        advice="The checkpoint that was rated best is kept. Read held-out completions of both; entropy, KL and mismatch of the steps "
        "between say what went wrong.",
    ),
    Alert(
        name="TreadwheelRewardHeld",
        # Of the driver that lives: one that died while it held never counts the end.
        expression=f"max by (run) ({_HELD} - ({_RESUMED} or 0 * {_HELD}) > 0 and on (run, WorkerId) {LAST_STEP_TIME})",
        lasts="5m",
        severity="critical",
        summary="what a judge calls is away, and its groups wait",
        advice="Event `reward_held` names the endpoint. Bring it back: the groups go on. After `reward.hold_s` the run stops, and the "
        "same command goes on later.",
    ),
)


def groups() -> list[dict[str, Any]]:
    """Prometheus's rule groups."""
    return [{"name": "treadwheel", "rules": [alert.rule() for alert in ALERTS]}]

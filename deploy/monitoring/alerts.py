"""Prometheus's alerts about runs: when each fires, what it means, and what to do. docs/monitoring.md and the rule files are made from
them."""

from dataclasses import dataclass
from typing import Any, Literal

from deploy.monitoring.series import EVENTS, LAST_STEP_TIME, series

_PAGE = "docs/monitoring.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One rule. Every alert has the label `run`."""

    name: str
    expression: str
    """PromQL with a sample for each affected run."""
    lasts: str = "0m"
    """Time that the expression must hold before the alert fires."""
    severity: Literal["critical", "warning", "info"]
    summary: str
    """The state of the run `{{ $labels.run }}`."""
    advice: str
    """Meaning and remedy."""

    def rule(self) -> dict[str, Any]:
        """The rule in Prometheus's form."""
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
    """Query of the number of events of a kind within a time, by run, as far as Prometheus saw them; no sample for a run without events.
    Prometheus's own `increase` misses a counter's first event."""
    selected = f'{EVENTS}{{kind="{kind}"}}'
    now, before, first = (
        f"sum by (run, WorkerId) ({each})"
        for each in (selected, f"{selected} offset {within}", f"min_over_time({selected}[{within}])")
    )
    # A counter that was scraped less often than its driver's other series began at 0. Another counter may be old, and Prometheus was away.
    counted, lived = (
        f"max by (run, WorkerId) (count_over_time({each}[{within}]))" for each in (selected, LAST_STEP_TIME)
    )
    return f"sum by (run) (({now} - ({before} or 0 * ({counted} < {lived}) or {first})) > 0)"


_STILL_S = f"(time() - {series('last_step_time')})"
_NEWEST = f"topk by (run) (1, max by (run, WorkerId) (max_over_time({LAST_STEP_TIME}[6h])))"
"""The newest driver of each run."""
_BEST = f"max_over_time({series('eval/reward')}[1d:1m])"
_ASYNCHRONOUS = f"and on (run) {series('staleness/bound')} > 0"
_HELD, _RESUMED = (f'sum by (run, WorkerId) ({EVENTS}{{kind="reward_{each}"}})' for each in ("held", "resumed"))

ALERTS = (
    Alert(
        name="TreadwheelNoProgress",
        # A step is logged after its evaluation.
        expression=f"{_STILL_S} > 900 unless on (run) {_STILL_S} < 5 * {series('time/step_s')} "
        f"unless on (run) {_STILL_S} < 5 * ({series('time/step_s')} + {series('time/eval_s')})",
        lasts="2m",
        severity="critical",
        summary="no step for {{ $value | humanizeDuration }}, more than five times as long as the last step and evaluation took",
        advice="`treadwheel info RUN_DIR` shows what each actor does and since when. A start that loads a large model or waits for nodes "
        "is not a fault. Otherwise the driver's log and events.jsonl name the actor that others wait for. The run ends by itself after "
        "a time without progress as long as all its deadlines together: `supervision.start_s`, `rollout.timeout_s`, `reward.hold_s` and "
        "others.",
    ),
    Alert(
        name="TreadwheelRunEndedAbnormally",
        # The newest driver of the run, unless it reported how it ended, and unless a driver is alive.
        expression=f"max by (run) ({_NEWEST} "
        # Its head may be gone by then, and with it the driver's last report. A preempted driver saves after `preempted`, before `stopped`.
        f'unless on (run, WorkerId) max_over_time({EVENTS}{{kind=~"finished|stopped|preempted"}}[6h])) unless on (run) {LAST_STEP_TIME}',
        lasts="2m",
        severity="critical",
        summary="its driver failed, was killed, or cannot be scraped, and no other driver has taken over",
        advice="The last line of events.jsonl is `failed` with the reason, if the driver could still write it. Start the same command "
        "again: it goes on after the last recorded step. If Prometheus lost the head, repair that. The alert ends six hours after the "
        "run's end.",
    ),
    Alert(
        name="TreadwheelNotResumed",
        # The newest driver of the run, if it was preempted, and unless a driver is alive.
        expression=f"max by (run) ({_NEWEST} "
        f'and on (run, WorkerId) max_over_time({EVENTS}{{kind="preempted"}}[6h])) unless on (run) {LAST_STEP_TIME}',
        lasts="30m",
        severity="critical",
        summary="its node went away, and no other driver has taken over",
        advice="The run was saved and ended with exit code 75. Start the same command again, or raise the `backoffLimit` of its RayJob: "
        "each preemption counts. The alert ends six hours after the run's end.",
    ),
    Alert(
        name="TreadwheelLearnerStarved",
        expression=f"{series('buffer/learner_wait_s')} / {series('time/step_s')} > 0.5 {_ASYNCHRONOUS}",
        lasts="30m",
        severity="warning",
        summary="the learner waits for groups in {{ $value | humanizePercentage }} of a step",
        advice="Sampling or judging is too slow for the learner. Use more workers (`treadwheel scale RUN_DIR rollout_workers=N`, or a "
        "larger `elastic.max_workers`), shorter completions, or more reward services if judging takes longer (row Rewards).",
    ),
    Alert(
        name="TreadwheelWorkersMissing",
        expression=f"{series('rollout/num_wanted')} - {series('rollout/num_workers')} > 0",
        lasts="20m",
        severity="warning",
        summary="{{ $value }} of the wanted rollout workers do not serve",
        advice="Event `worker_waits` names the workers without a node, and the autoscaler's reason (quota, stock). `treadwheel info "
        "RUN_DIR` names the workers that start or load weights. The run goes on with the others.",
    ),
    Alert(
        name="TreadwheelWorkerFlapping",
        expression=f"{came('failure', within='30m')} > 3",
        severity="warning",
        summary="actors failed {{ $value }} times in half an hour",
        advice="Events `failure` in events.jsonl name actor, node and reason. All on one node: remove it. Short of memory: lower "
        "`rollout.kv_cache_bytes` or `learner.max_tokens_per_micro_batch`. The run stops by itself after `supervision.max_restarts`.",
    ),
    Alert(
        name="TreadwheelRewardErrors",
        expression=f"{series('reward/num_errors')} / {series('buffer/num_judged')} > 0.05",
        lasts="10m",
        severity="warning",
        summary="{{ $value | humanizePercentage }} of the trajectories have no reward: their judge raised",
        advice="Events `reward_failure` have the judge's message. The trajectories do not train. A judge that fails on one kind of answer "
        "biases the run.",
    ),
    Alert(
        name="TreadwheelRewardTimeouts",
        expression=f"{series('reward/num_timeouts')} / {series('buffer/num_judged')} > 0.05",
        lasts="10m",
        severity="warning",
        summary="{{ $value | humanizePercentage }} of the trajectories have no reward: their judge was too slow",
        advice="Raise `reward.timeout_s` or the part's `timeout_s`, make the judge faster, or repair the server that it calls.",
    ),
    Alert(
        name="TreadwheelStalenessAtBound",
        expression=f"{series('staleness/mean')} >= {series('staleness/bound')} {_ASYNCHRONOUS}",
        lasts="30m",
        severity="info",
        summary="all groups are as old as the bound allows, {{ $value }} steps",
        advice="Workers sample faster than the learner learns, and then idle. Use fewer workers, or more processors for the learner. "
        "Groups older than the bound are never learned from.",
    ),
    Alert(
        name="TreadwheelCanaryNearTolerance",
        expression=f"{series('weights/canary_error')} / {series('weights/canary_tolerance')} > 0.5",
        lasts="10m",
        severity="warning",
        summary="engine and learner differ by {{ $value | humanizePercentage }} of the tolerance",
        advice="Above the tolerance, workers are refused and replaced. If the difference rises with the steps, a part of the weights may "
        "not arrive: compare `weights/canary_max_error`. If it is constant from the start, the engine's noise is larger than expected: "
        "set `rollout.head_dtype: float32`, or raise `weights.canary_tolerance`.",
    ),
    Alert(
        name="TreadwheelMismatchRising",
        expression=f"{series('mismatch/mean_abs_nats')} > 0.01 and "
        f"{series('mismatch/mean_abs_nats')} > 2 * avg_over_time({series('mismatch/mean_abs_nats')}[2h:1m] offset 30m)",
        lasts="15m",
        severity="warning",
        summary="rollout and learner log-probs differ by {{ $value | humanize }} nats, more than twice as much as before",
        advice="The difference includes off-policy steps: look at `mismatch/off_policy_steps`. If there are none, a correction "
        "(`algorithm.corrections`) keeps the gradient right for a while; `mismatch.stop_nats` ends the run before it learns from "
        "noise.",
    ),
    Alert(
        name="TreadwheelUpdatesSkipped",
        expression=f"{series('learner/skipped_in_a_row')} >= 2",
        severity="critical",
        summary="{{ $value }} updates in a row were skipped: loss or gradient is not finite",
        advice="Nothing is learned, and after `learner.max_non_finite_updates` the run stops. The trajectories of these updates are in the "
        "folder `quarantine` of the run directory. Start a run in another `run_dir` with a smaller `optimizer.learning_rate` and an "
        "earlier checkpoint's `model` folder as `model.path`.",
    ),
    Alert(
        name="TreadwheelKlRunaway",
        expression=f"{series('learner/kl_old_k3_mean')} > 0.1 or {series('learner/kl_reference_k3_mean')} > 1",
        lasts="10m",
        severity="warning",
        summary="the policy moves by {{ $value | humanize }} nats a token",
        advice="It moves away from π_old, the policy of the ratios (limit 0.1), or from the reference (limit 1). Lower the learning rate, "
        "set `learner.stop_at_kl`, or raise `algorithm.kl.loss.coefficient`. Read samples: reward hacking looks like this.",
    ),
    Alert(
        name="TreadwheelEntropyCollapse",
        expression=f"{series('learner/entropy_mean')} < 0.1 * max_over_time({series('learner/entropy_mean')}[1d:5m])",
        lasts="15m",
        severity="warning",
        summary="entropy is {{ $value | humanize }} nats a token, less than a tenth of its highest value of the day",
        advice="Groups of equal answers have no advantage, and learning stops. This is normal at the end of an easy task. Otherwise use a "
        "higher `sampling.temperature`, `algorithm.entropy_coefficient`, a wider upper clip of the policy loss, or harder prompts.",
    ),
    Alert(
        name="TreadwheelTruncated",
        expression=f"{series('tokens/truncated_share')} > 0.3",
        lasts="30m",
        severity="warning",
        summary="{{ $value | humanizePercentage }} of the completions are truncated",
        advice="Raise `sampling.max_tokens`, or shape the reward against length. Judges rate most truncated completions as wrong.",
    ),
    Alert(
        name="TreadwheelCheckpointStale",
        expression=f"max by (run) ({LAST_STEP_TIME} offset 6h) unless on (run) {came('checkpoint', within='6h')} "
        f"and on (run) {series('last_step_time')}",
        severity="warning",
        summary="no checkpoint for six hours",
        advice="A crash loses no recorded step, but steps since the last checkpoint are learned again. Lower `checkpoint.every_steps`, "
        "and look for `checkpoint_failed` in events.jsonl.",
    ),
    Alert(
        name="TreadwheelCheckpointFailed",
        expression=came("checkpoint_failed", within="1h"),
        severity="critical",
        summary="a checkpoint was not saved",
        advice="Event `checkpoint_failed` has the reason: a full disk, or an error of the object store. A run that goes on tries again at "
        "its next checkpoint.",
    ),
    Alert(
        name="TreadwheelStorageFailing",
        expression=came("storage_failed", within="1h"),
        severity="critical",
        summary="the run could not write to its object store",
        advice="Event `storage_failed` has the store's answer: credentials, rights, network, or a busy store. Lines are kept and written "
        "later. The run ends if the groups of a step cannot be written within minutes; then the same command goes on.",
    ),
    Alert(
        name="TreadwheelBufferFull",
        expression=f"{series('buffer/size_bytes')} / {series('buffer/max_size_bytes')} > 0.9",
        lasts="10m",
        severity="warning",
        summary="waiting trajectories fill {{ $value | humanizePercentage }} of `buffer.max_size_bytes`",
        advice="A full buffer stops sampling until the learner takes groups. Raise `buffer.max_size_bytes` and the nodes' object stores, "
        "or lower `buffer.max_off_policy_steps`.",
    ),
    Alert(
        name="TreadwheelEvaluationRegressed",
        expression=f"{_BEST} - {series('eval/reward')} > 0.2 * abs({_BEST}) "
        # Near 0 a fifth is noise.
        f"unless on (run) {_BEST} - {series('eval/reward')} < 2 * max_over_time({series('eval/reward_stderr')}[1d:1m])",
        lasts="1m",
        severity="warning",
        summary="held-out reward is {{ $value | humanize }} below its best of the day",
        advice="The best checkpoint is kept. Compare its held-out completions with the latest ones; entropy, KL and mismatch of the "
        "steps between show what went wrong.",
    ),
    Alert(
        name="TreadwheelRewardHeld",
        # Only of a living driver: a driver that died while it held groups never counts the end.
        expression=f"max by (run) ({_HELD} - ({_RESUMED} or 0 * {_HELD}) > 0 and on (run, WorkerId) {LAST_STEP_TIME})",
        lasts="5m",
        severity="critical",
        summary="a server that a judge calls is unavailable, and its groups wait",
        advice="Event `reward_held` names the endpoint. When it answers again, the groups go on. After `reward.hold_s` the run stops, and "
        "the same command goes on later.",
    ),
)


def groups() -> list[dict[str, Any]]:
    """Prometheus's rule groups."""
    return [{"name": "treadwheel", "rules": [alert.rule() for alert in ALERTS]}]

"""Grafana's dashboard of runs, as code. Titles and places are here; meanings, units and queries come from the registry.

Every metric of the registry is in a panel: the last, collapsed row has all metrics that no other row names.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.common import GraphDrawStyle, StackingMode, TooltipDisplayMode, VisibilityMode

from deploy.monitoring.series import EVENTS, SHOWN, causes, registry, series, unit

_SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
_NODE = 'instance=~"$node"'
_MARKED = (
    "launched|resumed|finished|stopped|failed|preempted|checkpoint|checkpoint_failed|scale|failure|worker_joined|"
    "worker_left|reward_held"
)
"""Events that are marked in every panel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Some metrics of the registry, in the unit of the first one, or other queries with their legends."""

    title: str
    names: tuple[str, ...] = ()
    queries: tuple[tuple[str, str], ...] = ()
    """Legend and query."""
    unit: str | None = None
    says: str = ""
    is_stacked: bool = False


def _panel(title: str, *names: str, is_stacked: bool = False) -> Panel:
    return Panel(title=title, names=names, is_stacked=is_stacked)


def _of_causes(title: str, kind: str) -> Panel:
    says = "Seconds of all actors since the last step, by their use: busy, or the cause of a wait."
    query = ("{{run}} {{cause}}", causes(kind))
    return Panel(title=title, queries=(query,), unit="s", says=says, is_stacked=True)


def _of_nodes(title: str, metric: str, *, unit: str, says: str, scaled: str = "") -> Panel:
    query = ("{{instance}}", f"sum by (instance) ({metric}{{{_NODE}}}){scaled}")
    return Panel(title=title, queries=(query,), unit=unit, says=says)


ROWS: dict[str, tuple[Panel, ...]] = {
    "Learning": (
        _panel("Reward", "reward/mean", "eval/reward", "eval/reward/<source>", "buffer/candidate_reward"),
        _panel("Reward by part, component and source", "reward/<component>"),
        _panel("Held out", "eval/accuracy", "eval/accuracy/<source>", "eval/pass_at_<k>"),
        _panel("KL", "learner/kl_old_k3_mean", "learner/kl_rollout_k3_mean", "learner/kl_reference_k3_mean"),
        _panel("Entropy", "learner/entropy_mean"),
        _panel(
            "Tokens held by a bound",
            "learner/clip_fraction_low",
            "learner/clip_fraction_high",
            "learner/clip_fraction_dual",
        ),
        _panel("Loss", "learner/loss"),
        _panel("Gradient norm", "learner/gradient_norm", "learner/gradient_norm_max"),
        _panel("Completion length", "tokens/completion_mean"),
        _panel("Truncated completions", "tokens/truncated_share"),
    ),
    "Trust": (
        _panel("Canary", "weights/canary_error", "weights/canary_tolerance", "weights/noise_floor"),
        _panel("Mismatch of log-probs", "mismatch/mean_abs_nats", "mismatch/max_abs_nats"),
        _panel("Staleness", "staleness/mean", "staleness/max", "staleness/bound"),
        _panel("Weights refused", "weights/num_refused", "weights/num_indistinguishable"),
        _panel("Updates not made", "learner/skipped", "learner/empty_updates", "learner/stopped_at_kl"),
        _panel("Effective sample size", "learner/importance_weight_ess", "learner/trajectory_weight_ess"),
    ),
    "Flow": (
        Panel(
            title="Since the last step",
            queries=(("{{run}}", f"time() - {series('last_step_time', labels=SHOWN)}"),),
            unit="s",
            says="Seconds since the last step.",
        ),
        _panel("Steps", "policy_version"),
        _panel(
            "Seconds of a step", "buffer/learner_wait_s", "time/learning_s", "weights/learner_wait_s", is_stacked=True
        ),
        _panel("Step and sampling", "time/step_s", "time/sampling_s", "time/eval_s"),
        _panel("Tokens a second", "speed/sampling_tokens_per_s", "speed/learning_tokens_per_s"),
        _panel("Groups", "buffer/num_ready", "buffer/num_under_way", "buffer/num_dropped"),
        _panel("Dropped groups, by reason", "buffer/dropped_<reason>"),
        _panel("Finished groups wait for slower ones", "buffer/head_of_line_s"),
        _panel("Waiting bytes", "buffer/size_bytes", "buffer/max_size_bytes"),
    ),
    "Fleet": (
        _panel("Rollout workers", "rollout/num_wanted", "rollout/num_workers", "rollout/num_coming"),
        _panel("Idle share of workers", "rollout/idle_share"),
        _panel("Restarts", "supervision/num_deaths", "supervision/num_hangs", "supervision/num_errors"),
        _panel("Spot nodes", "rollout/spot_evictions", "rollout/groups_saved", "rollout/groups_handed_over"),
        _panel("Until a worker serves", "time/join_s"),
        _panel("Transfer of weights", "weights/pause_s", "time/publish_s"),
    ),
    "Cost": (
        _of_causes("Learner's time", "learner"),
        _of_causes("Rollout workers' time", "rollout_worker"),
        _of_causes("Reward services' time", "reward_service"),
        _panel("GPU-hours of a step", "cost/gpu_hours", "cost/idle_gpu_hours"),
    ),
    "Rewards": (
        _panel("Failed rewards", "reward/num_errors", "reward/num_timeouts", "learner/failed_rewards"),
        _panel("Seconds of judging, a group", "time/judging_s", "time/<part>/judging_s"),
        _panel("Seconds held for a judge's server", "time/held_s", "time/<part>/held_s"),
        _panel("Reward services", "rollout/num_services"),
    ),
    "Environments": (
        _panel("Reward of episodes", "environment/<name>/reward"),
        _panel("Turns and tool calls of an episode", "environment/<name>/turns", "environment/<name>/calls"),
        _panel("Malformed calls", "environment/<name>/malformed_share"),
        _panel("Failed episodes", "environment/<name>/num_failed", "environment/<name>/num_retried"),
        _panel("Episodes at a limit", "environment/<name>/truncated_share"),
        _panel(
            "Tokens not sampled by the policy",
            "environment/<name>/written_share",
            "environment/<name>/written_share/<role>",
        ),
        _panel("Seconds of an episode", "time/environment/<name>/episode_s"),
        _panel("Waiting for environments and tools", "time/environment/<name>/waiting_share"),
    ),
    "Engine": (
        _panel("Running requests", "engine/num_running"),
        _panel("Requests waiting for room in the cache", "engine/num_waiting"),
        _panel("Key-value cache in use", "engine/cache_share"),
    ),
    "Machines": (
        _of_nodes("Processors", "ray_node_cpu_utilization", scaled=" / 100", unit="percentunit", says="Busy share."),
        _of_nodes("Memory", "ray_node_mem_used", unit="bytes", says="Used."),
        _of_nodes("Disk", "ray_node_disk_usage", unit="bytes", says="Used, where Ray has its folder."),
        _of_nodes("Object store", "ray_object_store_used_memory", unit="bytes", says="Trajectories and weights."),
        Panel(
            title="GPUs",
            queries=(("{{instance}}", f"avg by (instance) (ray_node_gpus_utilization{{{_NODE}}}) / 100"),),
            unit="percentunit",
            says="Busy share, mean of a node's.",
        ),
        _of_nodes("GPU memory", "ray_node_gram_used", scaled=" * 1048576", unit="bytes", says="Used."),
    ),
}


def rows() -> dict[str, tuple[Panel, ...]]:
    """All rows; the last has the metrics that are in no other row."""
    return ROWS | {"All other metrics": tuple(_left())}


def _left() -> Iterator[Panel]:
    named = {name for row in ROWS.values() for panel in row for name in panel.names} | {"last_step_time"}
    # Parts and components of the reward are all in the panel of the components.
    left = [name for name in registry().keys() - named if not (name.startswith("reward/") and "<" in name)]
    # Metrics of one kind, by their first words, share a panel.
    kinds = sorted((_kind(name), unit(name), name) for name in left)
    for (kind, _), members in groupby(kinds, key=lambda each: each[:2]):
        yield _panel(kind, *(name for _, _, name in members))


def _kind(name: str) -> str:
    group, _, rest = name.partition("/")
    return f"{group}/{rest.partition('_')[0]}" if group == "learner" else group


def queries(panel: Panel) -> Iterator[tuple[str, str]]:
    """Legend and query of each line."""
    for name in panel.names:
        legend = "{{__name__}}" if "<" in name else name.rpartition("/")[2] if len(panel.names) > 1 else ""
        yield f"{{{{run}}}} {legend}".strip(), series(name, labels=SHOWN)
    yield from panel.queries


def made() -> str:
    """The dashboard as Grafana imports it."""
    whole = (
        dashboard.Dashboard("Treadwheel runs")
        .uid("treadwheel-runs")
        .tags(["treadwheel"])
        .refresh("10s")
        .time("now-1h", "now")
        .editable()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus"))
        .with_variable(_variable("run", "label_values(ray_treadwheel_last_step_time, run)"))
        .with_variable(_variable("node", "label_values(ray_node_cpu_utilization, instance)"))
        .annotation(
            dashboard.AnnotationQuery()
            .name("Events")
            .datasource(_SOURCE)
            .enable(True)
            .icon_color("blue")
            .expr(annotated())
        )
    )
    for title, panels in rows().items():
        row = dashboard.Row(title)
        if title not in ROWS:
            for panel in panels:
                row.with_panel(_built(panel))
            row.collapsed(True)
        whole.with_row(row)
        if title in ROWS:
            for panel in panels:
                whole.with_panel(_built(panel))
    decoded = json.loads(JSONEncoder().encode(whole.build()))
    # Fields of Grafana's Prometheus source that the package lacks.
    decoded["annotations"]["list"][0] |= {"titleFormat": "{{kind}}", "textFormat": "{{run}}", "step": "10s"}
    return json.dumps(decoded, sort_keys=True, indent=1) + "\n"


def annotated() -> str:
    """Query of the marks: events of the last minute, by run and kind. Old events seem new if Prometheus was down when they came."""
    selected = f'{EVENTS}{{{SHOWN}, kind=~"{_MARKED}"}}'
    now, before = (f"sum by (run, kind) ({each})" for each in (selected, f"{selected} offset 1m"))
    return f"({now} - ({before} or 0 * {now})) > 0"


def _variable(name: str, query: str) -> dashboard.QueryVariable:
    every = models.VariableOption(text="All", value="$__all", selected=True)
    return (
        dashboard.QueryVariable(name)
        .datasource(_SOURCE)
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(every)
    )


def _built(panel: Panel) -> timeseries.Panel:
    meanings = [registry()[name] if len(panel.names) == 1 else f"{name}: {registry()[name]}" for name in panel.names]
    drawn = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.says or "\n\n".join(meanings))
        .datasource(_SOURCE)
        .unit(panel.unit or unit(panel.names[0]))
        .height(7)
        .span(8)
        .draw_style(GraphDrawStyle.LINE)
        .show_points(VisibilityMode.NEVER)
        .fill_opacity(25 if panel.is_stacked else 5)
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )
    if panel.is_stacked:
        drawn.stacking(common.StackingConfig().mode(StackingMode.NORMAL).group("A"))
    for place, (legend, query) in enumerate(queries(panel)):
        drawn.with_target(prometheus.Dataquery().expr(query).legend_format(legend).ref_id(f"Q{place}"))
    return drawn

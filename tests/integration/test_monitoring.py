"""A real Prometheus on a real run: no series has a hole, every query of the dashboard is answered, an alert reaches its receiver.

One run for all: it takes a few steps, stands still for longer than Ray keeps a gauge, takes some more, and is killed.
"""

import json
import math
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from cluster.sinks.ray import exported_name
from deploy.monitoring import dashboard
from deploy.monitoring.alerts import ALERTS
from tests.integration.commands import QUICKSTART, SMALL, Background
from tests.integration.conversations import ENVIRONMENT
from tests.integration.prometheus import Prometheus, Webhook, alertmanager, eventually, prometheus, webhook
from tests.integration.ray_head import ray_head
from tests.programs import needs

pytestmark = [
    pytest.mark.ray,
    pytest.mark.engine,
    pytest.mark.acceptance,
    pytest.mark.timeout(1800),
    needs("prometheus", package="prometheus"),
    needs("prometheus-alertmanager", package="prometheus-alertmanager"),
]
RUN, LABEL = "watched", "watched-[0-9a-f]{4}"
"""The run directory's name, and a pattern of the label that follows from it."""
SUMS = "{name: reasoning_gym, task: chain_sum, min_terms: 2, max_terms: 2, min_digits: 2, max_digits: 2, size: 2000}"
PRODUCTS = "{name: reasoning_gym, task: products, min_terms: 2, max_terms: 2, size: 2000}"
"""Every second group has an environment, which their column `task` names."""
STILL_S = 55
"""How long the run stands still."""
KEPT_S = 35
"""Longer than Ray keeps a gauge after it was set: 20 s, and up to 10 s until it is exported."""
EXPORTED_S = 20
"""Until Prometheus knows a new series: Ray exports every 10 s, and a scrape comes after it."""

NOT_IN_THIS_RUN = {
    "GPUs": ("GPUs", "GPU memory"),
    "a critic": (
        "learner/critic_gradient_norm",
        "learner/critic_gradient_norm_max",
        "learner/explained_variance",
        "learner/return_mean",
        "learner/return_std",
        "learner/value_clip_fraction",
        "learner/value_error_mean",
        "learner/value_error_std",
        "learner/value_loss",
        "learner/value_max",
        "learner/value_mean",
        "learner/value_min",
    ),
    "distillation or demonstrations": (
        "learner/demonstration_logprob_mean",
        "learner/demonstration_logprob_min",
        "learner/distillation_kl_max",
        "learner/distillation_kl_mean",
        "learner/distillation_loss",
        "learner/rest_mean",
        "learner/rest_reference_mean",
        "learner/sft_loss",
    ),
    "terms and bounds that its objective lacks": (
        "learner/clip_fraction_covariance",
        "learner/clip_fraction_dual",
        "learner/entropy_loss",
        "learner/kl_reward_coefficient",
        "learner/kl_rollout_coefficient",
        "learner/kl_rollout_loss",
        "learner/kl_step_k3_max",
        "learner/kl_step_k3_mean",
        "updates/<quantity>/<number>",
    ),
    "parts and sources of rewards": (
        "eval/pass_at_<k>",
        "eval/pass_at_<k>_stderr",
        "eval/reward/<source>",
        "eval/accuracy/<source>",
        "time/<part>/held_s",
        "time/<part>/judging_s",
    ),
    "prompts that are chosen, limited or dropped": (
        "buffer/candidate_reward",
        "buffer/dropped_<reason>",
        "prompts/num_dropped",
        "prompts/num_skipped",
        "prompts/num_truncated",
    ),
    "an outage of a judge, a worker that joins": ("time/held_s", "time/join_s"),
    "weights of which only what changed travels": ("weights/changed_share",),
    "experts whose choices are replayed": (
        "learner/router_aux_loss",
        "learner/routing_differs",
        "learner/without_experts",
    ),
}
"""Of the dashboard's queries, those that this run has no data for, by the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    run_dir: Path
    prometheus: Prometheus
    webhook: Webhook
    driver: Background

    def shown(self, name: str) -> float:
        """What Prometheus knows; NaN when it knows nothing."""
        found = self.prometheus.value(f'ray_treadwheel_{name}{{run=~"{LABEL}"}}')
        return math.nan if found is None else found

    def steps(self) -> list[dict[str, float]]:
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def watched(tmp_path_factory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("monitoring")
    run_dir, gate = folder / RUN, folder / "gate"
    settings = (
        f"run_dir={run_dir}",
        "num_steps=1000",
        "metrics.sinks=[jsonl, ray]",
        "evaluation.every_steps=1",
        f"prompts={{sources: {{sums: {SUMS}, products: {PRODUCTS}}}}}",
        f"environments={{chain_sum: single_turn, products: {{name: '{ENVIRONMENT}', turns: 2}}}}",
        "episodes={column: task, compared_share: 1.0, on_turn_length: continue}",
        f"reward={{judge: {{name: 'tests.integration.judges:held_by', file: {gate}}}, timeout_s: 300}}",
    )
    with (
        ray_head() as head,
        webhook() as hook,
        alertmanager(folder, webhook=hook.url) as receiver,
        prometheus(head, folder, alertmanager=receiver) as server,
        Background("train", QUICKSTART, *SMALL, *settings, "--address", head.address, env=head.env) as driver,
    ):
        watched = Watched(run_dir=run_dir, prometheus=server, webhook=hook, driver=driver)
        driver.wait_until(lambda: watched.shown("policy_version") > 1)
        gate.touch()
        driver.wait_until(lambda: time.time() - watched.shown("last_step_time") > STILL_S)
        driver.wait_until(lambda: watched.shown("policy_version") > 1)  # of the last scrape too
        version = watched.shown("policy_version")
        gate.unlink()
        driver.wait_until(lambda: watched.shown("policy_version") > version + 1)
        yield watched


def test_every_series_of_the_run_is_there_at_every_scrape(watched):
    began = {}
    for step in watched.steps():
        for name, value in step.items():
            if name != "time" and value is not None and math.isfinite(value):
                began.setdefault(name, step["time"])
    now = time.time()
    began = {name: at for name, at in began.items() if at < now - EXPORTED_S}
    assert len(began) > 80
    names = {name: f"ray_{exported_name(name)}" for name in began}
    missing = lambda: [name for name in began if not watched.prometheus.times(names[name], run=LABEL)]
    eventually(lambda: not missing(), within_s=120, what=missing)
    for name, at in began.items():
        times = watched.prometheus.times(names[name], run=LABEL)
        num_missed = watched.prometheus.num_missed(names[name], run=LABEL)
        assert num_missed <= 1, f"{num_missed} scrapes in a row went without {name}"
        assert at > now - STILL_S or times[-1] - times[0] > KEPT_S, f"{name} was there for {times[-1] - times[0]:.0f} s"


def test_prometheus_sees_all_that_ray_tells_of_with_its_token(watched):
    def health() -> list[str]:
        return [target["health"] for target in watched.prometheus.ask("targets")["activeTargets"]]

    eventually(lambda: health() == ["up"] * 3, within_s=120, what=health)


def test_every_query_of_the_dashboard_is_answered_and_what_is_excused_is_not(watched):
    excused = {name for names in NOT_IN_THIS_RUN.values() for name in names}
    answered, empty = set(), set()
    for panel in (panel for panels in dashboard.rows().values() for panel in panels):
        names = [*panel.names, *(panel.title for _ in panel.queries)]
        for name, (_, query) in zip(names, dashboard.queries(panel), strict=True):
            asked = query.replace("$run", LABEL).replace("$node", ".*")
            (answered if watched.prometheus.query(asked) else empty).add(name)
    assert sorted(empty - excused) == [] and excused & answered == set()
    assert watched.prometheus.query(dashboard.annotated().replace("$run", LABEL).replace("1m", "10m"))


def test_every_series_that_an_alert_asks_for_is_there(watched):
    excused = {name for names in NOT_IN_THIS_RUN.values() for name in names}
    excused = {f"ray_{exported_name(name)}" for name in excused}
    for alert in ALERTS:
        for name in set(re.findall(r"ray_treadwheel_\w+", alert.expression)) - excused:
            assert watched.prometheus.query(f'{name}{{run=~"{LABEL}"}}'), f"{alert.name}: {name}"
    (group,) = watched.prometheus.ask("rules")["groups"]
    assert {(rule["health"], rule.get("lastError")) for rule in group["rules"]} == {("ok", None)}
    assert len(group["rules"]) == len(ALERTS)


def test_a_driver_that_is_killed_reaches_a_webhook_as_an_alert(watched):
    """The last one: it ends the run."""
    name, killed_at = "TreadwheelRunEndedAbnormally", time.time()

    def firing() -> list[dict[str, Any]]:
        """Not one of a scrape that failed before."""
        alerts = [alert for alert in watched.webhook.alerts(name) if alert["status"] == "firing"]
        return [alert for alert in alerts if datetime.fromisoformat(alert["startsAt"]).timestamp() > killed_at]

    watched.driver.send(signal.SIGKILL)
    eventually(lambda: bool(firing()), within_s=300, what=lambda: watched.webhook.alerts(name))
    (alert, *_) = firing()
    assert re.fullmatch(LABEL, alert["labels"]["run"])
    assert alert["annotations"]["summary"].startswith(f"{alert['labels']['run']}: its driver failed")

"""How a run ends is its last event."""

import asyncio
import contextlib
import json
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.contracts.errors import ConfigError, PreemptedError, StorageError, TreadwheelError, WorkerError
from cluster.contracts.sampling_config import SamplingConfig
from cluster.metrics import MetricLog
from cluster.record.ledger import Ledger
from cluster.record.run_directory import PASSPORT, RunDirectory
from cluster.rollouts.mixture import Mixture
from deploy import launch
from deploy.cluster_up.steering import waiting_orders
from deploy.config.loading import validated
from deploy.reports.provenance import RunProvenance
from learner.checkpoint import reading, writing
from learner.checkpoint.manifest import Manifest
from tests.fakes import ListedEvents, run_config
from tests.models import make_tiny_model


@pytest.fixture
def ended(tmp_path, monkeypatch):
    """Trains with `outcome` in place of the cluster's work, and returns the last event."""

    def train(outcome):
        async def work(config, run_dir, log, *, interrupted, address, ahead):
            log.step(2, {})
            if outcome:
                raise outcome

        monkeypatch.setattr(launch, "_train", work)
        config = validated(
            {"model": {"path": "m"}, "prompts": "file", "run_dir": str(tmp_path / "run"), "metrics": {"sinks": []}}
        )
        with contextlib.suppress(WorkerError, KeyboardInterrupt):
            launch.train(config)
        return last_event(tmp_path / "run")

    return train


def last_event(run: Path) -> dict:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert events[0]["kind"] == "launched"
    return {name: value for name, value in events[-1].items() if name not in ("time", "pid")}


def test_a_judge_that_fails_in_an_evaluation_is_told_of_on_the_terminal(tmp_path, monkeypatch, capsys):
    class Fails:
        async def run(self, rollouts, *, version, log):
            return {"eval/num_failed": 1.0}

    @contextlib.asynccontextmanager
    async def cluster(config, run_dir, ledger, log, *, wait_for_nodes_s):
        log.event("reward_failure", message="prompt 'p0': 1 of 1 rewards failed: KeyError: 'anser'")
        log.event("reward_failure")
        yield SimpleNamespace(production=None)

    monkeypatch.setattr(launch, "make_evaluator", lambda config: Fails())
    monkeypatch.setattr(launch, "connected", lambda address: contextlib.nullcontext())
    monkeypatch.setattr(launch, "cluster", cluster)
    config = validated({"model": {"path": "m"}, "prompts": "file", "run_dir": str(tmp_path)})
    assert launch.evaluate(config) == {"eval/num_failed": 1.0}
    assert capsys.readouterr().out == "reward_failure: prompt 'p0': 1 of 1 rewards failed: KeyError: 'anser'\n"


class Saved:
    """A learner that has learned three steps."""

    version = 3

    def __init__(self, saved_version, metric):
        self.saved_version, self.saved_metric = saved_version, metric
        self.saves = []
        self.rated = None

    def rate(self, metric):
        self.rated = metric

    async def save(self, metric):
        self.saved_version, self.saved_metric = 3, metric
        self.saves.append(metric)


class Scores:
    async def run(self, rollouts, *, version, log):
        return {"eval/reward": 0.75}


@pytest.mark.parametrize(
    ("every_steps", "saved_version", "metric", "lines", "rated"),
    [
        (3, 3, None, {}, ["saved"]),
        (3, 3, 0.5, {}, []),
        (2, 3, None, {}, []),
        (None, 3, None, {}, []),
        (3, 2, None, {}, ["noted"]),
        (3, 2, None, {3: {"eval/reward": 0.5}}, []),
    ],
)
async def test_a_step_whose_evaluation_was_broken_off_is_evaluated_when_the_run_goes_on(
    every_steps, saved_version, metric, lines, rated, tmp_path
):
    """Seen in review: its point was missing from the curve for ever, and it could not be kept as the best. One that was killed before it
    saved the step must look for that point."""
    learner, log, provenance = Saved(saved_version, metric), ListedEvents(), RunProvenance(RunDirectory(str(tmp_path)))
    for version, metrics in lines.items():
        provenance.step(version, metrics)
    config = run_config(num_steps=9, evaluation={"prompts": "file", "every_steps": every_steps})
    made = SimpleNamespace(learner=learner, production=None)
    await launch._evaluate_what_was_broken_off(config, made, Scores(), provenance, log)
    assert log.steps == ([(3, {"eval/reward": 0.75})] if rated else [])
    assert learner.saves == ([0.75] if rated == ["saved"] else [])
    assert learner.rated == (0.75 if rated == ["noted"] else None)


@pytest.mark.parametrize(
    ("saved_version", "metric", "saves"), [(3, None, [0.75]), (2, 0.5, [None, 0.75]), (3, 0.0, [])]
)
async def test_a_last_step_that_was_saved_while_it_was_evaluated_is_evaluated_when_the_run_goes_on(
    saved_version, metric, saves
):
    """Seen in review: Ctrl-C in the last evaluation saved the step, and the same command then ended without one. And one that was not saved
    was saved after its evaluation alone, where the next Ctrl-C lost it again."""

    learner, log = Saved(saved_version, metric), ListedEvents()
    await launch._save_the_end(SimpleNamespace(learner=learner, production=None), Scores(), log)
    assert log.steps == ([(3, {"eval/reward": 0.75})] if saves else [])
    assert learner.saves == saves


@pytest.mark.parametrize(
    ("recorded_steps", "num_steps", "metric", "settings", "is_done"),
    [
        (2, 2, 0.5, {"evaluation": {"prompts": "file"}}, True),
        (2, 2, None, {}, True),
        (2, 1, None, {}, True),
        (2, 2, None, {"recorded": "data.arrow", "evaluation": {"prompts": "file"}}, True),
        (2, 2, None, {"evaluation": {"prompts": "file"}}, False),
        (2, 3, 0.5, {}, False),
        (3, 3, 0.5, {}, False),
    ],
)
async def test_a_run_whose_last_step_is_saved_and_evaluated_has_nothing_left(
    recorded_steps, num_steps, metric, settings, is_done, tmp_path, monkeypatch
):
    """Its checkpoint is of step 2. One that is still to be evaluated is verified by its restore, and not twice."""
    run_dir, log, config = RunDirectory(str(tmp_path)), ListedEvents(), run_config(num_steps=num_steps, **settings)
    ledger = recorded(run_dir, num_steps=recorded_steps)
    assert not await launch.is_done(config, run_dir, ledger, log)
    saved = save_step_2(tmp_path, metric=metric)
    verified, verify = [], reading.verify
    monkeypatch.setattr(reading, "verify", lambda place: verified.append(place) or verify(place))
    assert await launch.is_done(config, run_dir, ledger, log) == is_done == bool(verified)
    assert [event["kind"] for event in log.events] == ["nothing_left"] * is_done
    (saved / "model" / "config.json").write_text("[]")
    assert not await launch.is_done(config, run_dir, ledger, log)


async def test_a_run_of_which_nothing_is_left_has_not_gone_on(tmp_path):
    """Seen before: a finished run that was asked for again had an interruption in its report, and a mark in its curves."""
    run_dir, log = RunDirectory(str(tmp_path)), ListedEvents()
    recorded(run_dir, num_steps=2)
    save_step_2(tmp_path, metric=None)
    asked = {"interrupted": asyncio.Event(), "address": None}
    await launch._train(run_config(num_steps=2), run_dir, log, **asked)
    assert [event["kind"] for event in log.events] == ["nothing_left"]
    for each, kinds in ((Ledger(run_dir), ["resumed"]), (Ledger(RunDirectory(str(tmp_path / "new"))), [])):
        log.events.clear()
        launch.note_resumed(each, log)
        assert [event["kind"] for event in log.events] == kinds


@pytest.mark.parametrize(
    ("schedule", "way_on"),
    [("constant", "with more num_steps"), ("linear", "model.path={run_dir}/checkpoints/step-000002/model")],
)
async def test_a_run_whose_schedule_has_ended_is_not_offered_more_steps(schedule, way_on, tmp_path):
    run_dir, log = RunDirectory(str(tmp_path)), ListedEvents()
    config = run_config(num_steps=2, optimizer={"schedule": schedule})
    save_step_2(tmp_path, metric=None)
    assert await launch.is_done(config, run_dir, recorded(run_dir, num_steps=2), log)
    assert way_on.format(run_dir=tmp_path) in log.events[0]["message"]


def recorded(run_dir: RunDirectory, *, num_steps: int) -> Ledger:
    ledger = Ledger(run_dir)
    for step in range(num_steps):
        ledger.append(groups=[step], trajectories="none", trajectories_digest="none")
    return ledger


def save_step_2(run_dir: Path, *, metric: float | None, rated_by: str = "") -> Path:
    """Its checkpoint, of one file."""
    saved = run_dir / "checkpoints" / "step-000002"
    aside = writing.begin(saved)
    (aside / "model").mkdir()
    (aside / "model" / "config.json").write_text("{}")
    manifest = Manifest(
        policy_version=2,
        num_ranks=1,
        parameters_digest="p",
        metric=metric,
        rated_by=rated_by,
        learner={},
        extra={},
        files={},
    )
    entries = {"model/config.json": writing.seal(aside / "model" / "config.json")}
    writing.commit(aside, saved, manifest.sealed(entries))
    return saved


async def test_a_last_step_that_only_its_training_rated_is_still_to_be_evaluated(tmp_path):
    """Its run evaluates since this command."""
    config, log, run_dir = (
        run_config(num_steps=2, evaluation={"prompts": "file"}),
        ListedEvents(),
        RunDirectory(str(tmp_path)),
    )
    ledger = recorded(run_dir, num_steps=2)
    save_step_2(tmp_path, metric=0.5, rated_by="reward")
    assert not await launch.is_done(config, run_dir, ledger, log)


async def test_changed_prompts_are_refused_before_anything_starts_once_a_step_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "connected", lambda *args, **more: pytest.fail("it started"))
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1="}\n')
    config = run_config(num_steps=3, prompts={"name": "file", "path": str(tmp_path / "a.jsonl")})
    run_dir = RunDirectory(str(tmp_path / "run"))
    run_dir.write_json(PASSPORT, {"mathematics": {"prompts": {"num_rows": 2, "rows_digest": "0" * 32}}})
    recorded(run_dir, num_steps=1)
    with pytest.raises(ConfigError, match="2 rows of digest 000000000000 then, 1 of"), MetricLog([]) as log:
        await launch._train(config, run_dir, log, interrupted=asyncio.Event(), address=None)


async def test_another_tokenizer_is_refused_before_anything_starts_once_a_step_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "connected", lambda *args, **more: pytest.fail("it started"))
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1="}\n')
    model = {"path": str(make_tiny_model(tmp_path / "model"))}
    config = run_config(num_steps=3, model=model, prompts={"name": "file", "path": str(tmp_path / "a.jsonl")})
    run_dir = RunDirectory(str(tmp_path / "run"))
    run_dir.write_json(PASSPORT, {"mathematics": {"model": {"tokenizer_digest": "0" * 64}}})
    recorded(run_dir, num_steps=1)
    with pytest.raises(ConfigError, match="its tokenizer changed since this run began"), MetricLog([]) as log:
        await launch._train(config, run_dir, log, interrupted=asyncio.Event(), address=None)


async def test_a_run_that_is_stopped_while_its_actors_start_saves_the_steps_that_it_has_learned_again(
    tmp_path, monkeypatch
):
    done = []

    class Learner:
        async def save_progress(self, tell, *, log_s):
            done.append("saved")

    @contextlib.asynccontextmanager
    async def cluster(*args, saved, **more):
        async with saved(Learner()):
            raise asyncio.CancelledError
        yield

    for name, fake in {
        "cluster": cluster,
        "connected": lambda *args, **more: contextlib.nullcontext(),
        "ticket_office": lambda config, ledger: SimpleNamespace(source=Mixture.of(["1+1="])),
    }.items():
        monkeypatch.setattr(launch, name, fake)
    run_dir = RunDirectory(str(tmp_path))
    with pytest.raises(asyncio.CancelledError), MetricLog([]) as log:
        await launch._train(run_config(num_steps=3), run_dir, log, interrupted=asyncio.Event(), address=None)
    assert done == ["saved"]


async def test_a_run_that_is_stopped_in_its_last_evaluation_saves_what_it_has_and_hears_of_nodes_that_go_away(
    tmp_path, monkeypatch
):
    seen = []

    class Learner(Saved):
        async def save_progress(self, tell, *, log_s):
            seen.append("saved")

    class Stopped:
        async def run(self, rollouts, *, version, log):
            seen.append("evaluates")
            raise asyncio.CancelledError

    class Watch:
        def __init__(self, *args, **more): ...

        @contextlib.asynccontextmanager
        async def steering(self):
            try:
                yield
            finally:
                seen.append("watched until now")

    @contextlib.asynccontextmanager
    async def cluster(*args, **more):
        yield SimpleNamespace(
            learner=Learner(3, None), production=SimpleNamespace(fleet=None), weights=None, timesheet=None
        )

    async def run_loop(config, **more): ...

    for name, fake in {
        "cluster": cluster,
        "connected": lambda *args, **more: contextlib.nullcontext(),
        "ticket_office": lambda config, ledger: SimpleNamespace(source=Mixture.of(["1+1="])),
        "make_evaluator": lambda config: Stopped(),
        "Steering": Watch,
        "run_loop": run_loop,
    }.items():
        monkeypatch.setattr(launch, name, fake)
    config, run_dir = run_config(num_steps=3, evaluation={"prompts": "file"}), RunDirectory(str(tmp_path))
    with pytest.raises(asyncio.CancelledError), MetricLog([]) as log:
        await launch._train(config, run_dir, log, interrupted=asyncio.Event(), address=None)
    assert seen == ["evaluates", "watched until now", "saved"]


def test_a_run_that_ends_says_so(ended):
    assert ended(None) == {"kind": "finished", "policy_version": 2}


def test_a_run_that_is_stopped_says_so(ended):
    assert ended(asyncio.CancelledError()) == {"kind": "stopped", "policy_version": 2}


def test_a_run_that_is_preempted_was_stopped_and_says_how_it_goes_on(ended, tmp_path):
    with pytest.raises(PreemptedError, match="its node goes away; stopped before the first step; the same command sta"):
        ended(PreemptedError("its node goes away"))
    assert last_event(tmp_path / "run") == {"kind": "stopped", "policy_version": 2}


def test_a_run_whose_node_goes_away_takes_no_time_for_a_report(ended, monkeypatch):
    monkeypatch.setattr(launch, "leave", lambda directory: pytest.fail("it writes one"))
    with pytest.raises(PreemptedError):
        ended(PreemptedError("its node goes away"))


@pytest.mark.parametrize(
    "outcome", [None, KeyboardInterrupt(), WorkerError("no memory")], ids=["ends", "stops", "fails"]
)
def test_a_run_leaves_its_report_while_the_directory_is_still_its_own(ended, monkeypatch, outcome):
    seen = []

    def leave(directory):
        events = [event["kind"] for event in directory.read_json_lines("events.jsonl")]
        seen.append((directory.is_claimed, events[-1]))

    monkeypatch.setattr(launch, "leave", leave)
    last = ended(outcome)
    assert seen == [(True, last["kind"])]


def test_a_release_that_fails_does_not_hide_how_the_run_ended(ended, monkeypatch, capsys):
    def refuse(self):
        raise StorageError("metrics/000001.jsonl: the store was busy")

    monkeypatch.setattr(RunDirectory, "compact_lines", refuse)
    with pytest.raises(PreemptedError, match="its node goes away"):
        ended(PreemptedError("its node goes away"))
    assert capsys.readouterr().err == "treadwheel: metrics/000001.jsonl: the store was busy\n"
    with pytest.raises(StorageError, match="busy"):
        ended(None)


def test_events_that_cannot_be_written_do_not_hide_that_a_run_is_preempted(tmp_path, monkeypatch, capsys):
    """Seen in review: the command ended with 1 in place of 75, and nothing started it again."""

    async def work(config, run_dir, log, *, interrupted, address, ahead):
        run_dir.writer.flush()
        run_dir.remove("events.jsonl")
        (tmp_path / "events.jsonl").mkdir()
        log.event("preempted")
        raise PreemptedError("its node goes away")

    monkeypatch.setattr(launch, "_train", work)
    config = validated({"model": {"path": "m"}, "prompts": "file", "run_dir": str(tmp_path), "metrics": {"sinks": []}})
    with pytest.raises(PreemptedError, match="its node goes away; stopped before the first step"):
        launch.train(config)
    assert capsys.readouterr().err.startswith(f"treadwheel: {tmp_path}/events.jsonl: Is a directory; ")


def test_a_ctrl_c_that_falls_on_a_destructor_stops_the_run_and_gives_its_directory_back(tmp_path, monkeypatch):
    class Pressed:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    async def work(config, run_dir, log, *, interrupted, address, ahead):
        await asyncio.sleep(0)
        raise AssertionError("the run went on")

    def open_log(*_, **__):
        Pressed()
        return MetricLog([])

    monkeypatch.setattr(launch, "_train", work)
    monkeypatch.setattr(launch, "open_log", open_log)
    config = validated({"model": {"path": "m"}, "prompts": "file", "run_dir": str(tmp_path)})
    with pytest.raises(KeyboardInterrupt, match="stopped before the first step"):
        launch.train(config)
    assert RunDirectory(str(tmp_path)).owner() is None


def test_the_type_that_auto_comes_to_is_an_event_and_what_run_yaml_says(tmp_path, monkeypatch):
    async def work(config, run_dir, log, *, interrupted, address, ahead):
        assert config.model.dtype == "float32"

    monkeypatch.setattr(launch, "_train", work)
    monkeypatch.setattr("learner.model.compute_type.is_bfloat16_fast_on_cpu", lambda: False)
    settings = {"model": {"path": "m", "dtype": "auto"}, "prompts": "file", "metrics": {"sinks": []}}
    launch.train(validated({**settings, "run_dir": str(tmp_path)}))
    run_dir = RunDirectory(str(tmp_path))
    (chosen,) = (event for event in run_dir.read_json_lines("events.jsonl") if event["kind"] == "compute_type")
    assert chosen["dtype"] == "float32" and "without AMX, multiplies float32 faster" in chosen["message"]
    assert "dtype: float32" in run_dir.read_text("run.yaml")


@pytest.mark.parametrize("details", [{}, {"details": "Ray's own words"}])
def test_a_run_that_fails_says_of_what(ended, details):
    assert ended(WorkerError("rollout-0 died", **details)) == {
        "kind": "failed",
        "policy_version": 2,
        "error": "WorkerError",
        "reason": "rollout-0 died",
        **details,
    }


def test_an_evaluation_samples_as_the_run_does_but_for_its_temperature(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1"}\n')
    sampling = {"max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 20, "stop": ["."]}
    held_out = {"prompts": {"name": "file", "path": str(tmp_path / "prompts.jsonl")}, "temperature": 0.7}
    config = validated({"model": {"path": "m"}, "prompts": "file", "sampling": sampling, "evaluation": held_out})
    evaluator = launch.make_evaluator(config)
    assert evaluator is not None
    assert evaluator.tickets(0)[0].sampling == SamplingConfig(
        max_tokens=9, temperature=0.7, top_p=0.9, top_k=20, stop=(".",)
    )


def held_out(folder, **limit):
    make_tiny_model(folder / "model")
    rows = ["9" * 40, "1+1=", "9" * 40, "2+2=", "9" * 40]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    prompts = {"name": "file", "path": str(folder / "prompts.jsonl"), "text_as": "text", **limit}
    evaluation = {"prompts": prompts, "num_prompts": 2}
    return validated({"model": {"path": str(folder / "model")}, "prompts": "file", "evaluation": evaluation})


def test_long_held_out_prompts_are_left_out_and_counted(tmp_path):
    evaluator = launch.make_evaluator(held_out(tmp_path, max_prompt_tokens=4, on_long_prompt="drop"))
    assert [ticket.prompt.text for ticket in evaluator.tickets(0)] == ["1+1=", "2+2="]
    assert evaluator.num_too_long == 2


@pytest.mark.parametrize(
    ("limit", "rule", "why"),
    [
        (1, "drop", r"evaluation\.prompts\.max_prompt_tokens=1: all 5 prompts are longer; raise it"),
        (
            4,
            "error",
            r"has 40 tokens, and evaluation\.prompts\.max_prompt_tokens is 4; .* set evaluation\.prompts\.on_long",
        ),
    ],
)
def test_held_out_prompts_that_are_all_too_long_are_refused_under_their_own_name(tmp_path, limit, rule, why):
    with pytest.raises(TreadwheelError, match=why):
        launch.make_evaluator(held_out(tmp_path, max_prompt_tokens=limit, on_long_prompt=rule))


def test_an_order_to_an_earlier_driver_is_gone_once_the_directory_is_claimed(tmp_path, monkeypatch):
    directory, found = RunDirectory(str(tmp_path)), []

    async def work(config, run_dir, log, *, interrupted, address, ahead):
        found.append(waiting_orders(run_dir))

    directory.write_json("order-1.json", {"rollout_workers": 5})
    monkeypatch.setattr(launch, "_train", work)
    launch.train(
        validated({"model": {"path": "m"}, "prompts": "file", "run_dir": str(tmp_path), "metrics": {"sinks": []}})
    )
    assert found == [[]]

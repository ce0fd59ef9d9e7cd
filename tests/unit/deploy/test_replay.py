"""What a replay compares is what the run's own transport publishes."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from cluster.contracts.config import WeightsConfig
from cluster.contracts.errors import ConfigError
from cluster.contracts.learned import read_learned, written_learned
from cluster.contracts.types import BroadcastStats
from cluster.record.ledger import Ledger
from cluster.record.recorder import PRUNED
from cluster.record.run_directory import EVENTS, PASSPORT, RunDirectory
from cluster.supervision.placement import ClusterResources, Node
from deploy import replay as replaying
from deploy.cluster_up import start_up
from deploy.config.loading import resolved_yaml, validated
from deploy.replay import Replay, replay, replay_learned, weights_digest

CONFIG = {"model": {"path": "m"}, "prompts": "file"}


class OwnTransport:
    """A transport by full path, as a user's."""

    def __init__(self, *, timeout_s: float, prefix: str) -> None:
        self._prefix = prefix

    async def publish(self, learner: Any) -> BroadcastStats:
        (published,) = await learner.publish()
        digest = f"{self._prefix} {published}"
        return BroadcastStats(policy_version=3, digest=digest, size_bytes=1, seconds=0.0, attestations=())


class Learner:
    async def publish(self) -> list[Any]:
        return ["version 3"]


async def test_a_replay_publishes_through_the_configured_transport():
    config = WeightsConfig.model_validate({"transport": {"name": f"{__name__}:OwnTransport", "prefix": "digest of"}})
    assert await weights_digest(config, Learner()) == "digest of version 3"


def test_a_step_that_published_nothing_is_not_called_different():
    """A run that learns without sampling publishes at its start, its end and its checkpoints."""
    unknown = Replay(num_steps=2, digest="a", recorded_digest=None)
    assert (unknown.differs, unknown.verdict) == (False, "the run has no digest of step 2 to compare with")
    equal, other = (Replay(num_steps=2, digest="a", recorded_digest=digest) for digest in "ab")
    assert (equal.differs, equal.verdict) == (False, "equal")
    assert (other.differs, other.verdict) == (True, "not equal: the run published b")


def test_a_difference_names_the_settings_that_the_run_changed_on_its_way(tmp_path):
    run = {"model": {"path": "m"}, "prompts": "file", "run_dir": str(tmp_path)}
    for ranks, bucket_bytes in ((1, 100), (1, 50), (2, 50), (2, 50)):
        settings = run | {"learner": {"num_ranks": ranks}, "weights": {"bucket_bytes": bucket_bytes}, "num_steps": 9}
        directory = RunDirectory(str(tmp_path))
        directory.claim(resolved_yaml(validated(settings)))
        directory.append_json(EVENTS, {"kind": "launched", "time": 1.0, "moved": directory.moved})
        directory.release()
    assert replaying._moved(directory.read_json_lines(EVENTS)) == ("learner.num_ranks", "weights.bucket_bytes")
    other = Replay(num_steps=2, digest="a", recorded_digest="b", moved=("learner.num_ranks",))
    assert other.verdict.startswith(
        "not equal: the run published b; it changed learner.num_ranks on its way, so steps "
    )
    assert Replay(num_steps=2, digest="a", recorded_digest="a", moved=("learner.num_ranks",)).verdict == "equal"


def test_a_difference_names_what_the_run_was_computed_with_and_the_replay_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(replaying, "versions", lambda: {"torch": "2.13", "ray": "2.60"})
    directory = RunDirectory(str(tmp_path))
    directory.write_json(PASSPORT, {"versions": {"torch": "2.12", "ray": "2.60"}, "learner": {"processor": "AMX"}})
    for step, drivers in enumerate(({"torch": "2.12", "vllm": "0.32"}, {"torch": "2.13"}, {"torch": "2.14"}), start=1):
        directory.append_json(EVENTS, {"kind": "launched", "time": 1.0, "versions": drivers})
        directory.append_json(EVENTS, {"kind": "learner_loaded", "time": 1.0, "processor": f"AVX{step}"})
        directory.append_json(EVENTS, broadcast(step, "d"))
    events = directory.read_json_lines(EVENTS)
    others = replaying._others(directory, events, 2, {"processor": "AVX1"})
    assert others == (
        "torch 2.12 (now 2.13)",
        "vllm 0.32 (now none)",
        "the processor AMX (now AVX1)",
        "the processor AVX2 (now AVX1)",
    )
    assert "torch 2.14 (now 2.13)" in replaying._others(directory, events, 3, {"processor": "AVX1"})
    other = Replay(num_steps=2, digest="a", recorded_digest="b", others=others[:1])
    assert other.verdict == (
        "not equal: the run published b; it was computed with torch 2.12 (now 2.13), which may round differently"
    )


@pytest.mark.parametrize("passport", ["{}", '{"versions": {}, "learner": {}}', "torn"])
def test_an_earlier_or_unreadable_passport_has_nothing_to_compare(tmp_path, passport):
    (tmp_path / PASSPORT).write_text(passport)
    (tmp_path / EVENTS).write_text('{"kind": "launched", "time": 1.0}\n')
    directory = RunDirectory(str(tmp_path))
    assert replaying._others(directory, directory.read_json_lines(EVENTS), 1, {"processor": "AVX512"}) == ()


def broadcast(version: int, digest: str) -> dict[str, Any]:
    return {"kind": "broadcast", "time": 1.0, "policy_version": version, "digest": digest}


def recorded(folder: Path, *, steps: int) -> RunDirectory:
    directory = RunDirectory(str(folder))
    ledger = Ledger(directory)
    for step in range(1, steps + 1):
        name = f"trajectories/step-{step:06d}.arrow"
        directory.write_file(name, b"")
        ledger.append(groups=[step], trajectories=name, trajectories_digest="digest")
    return directory


def test_a_record_that_is_the_runs_own_and_cannot_be_compared_is_told_before_anything_is_learned(tmp_path, monkeypatch):
    directory = recorded(tmp_path, steps=2)
    directory.write_file("learned/step-000002.arrow", b"")
    asked = learned_again(monkeypatch)
    with pytest.raises(
        ConfigError, match=r"learned/step-000002\.arrow was written by the run, .* name another file with --out"
    ):
        replay_learned(directory, validated(CONFIG), step=2)
    replay_learned(directory, validated(CONFIG), step=2, out=str(tmp_path / "own.arrow"))
    assert asked == [2]


def test_trajectories_that_are_missing_are_told_before_anything_is_learned(tmp_path, monkeypatch):
    directory = recorded(tmp_path, steps=4)
    directory.write_file("checkpoints/step-000002/manifest.json", b"{}")
    directory.remove("trajectories/step-000002.arrow")
    asked = learned_again(monkeypatch)
    with pytest.raises(ConfigError, match=r"step-000002\.arrow, which step 2 consumed, is not there; .* all of them"):
        replay(directory, validated(CONFIG))
    with pytest.raises(ConfigError, match=r"step-000002\.arrow, which step 2 consumed, is not there"):
        replay_learned(directory, validated(CONFIG), step=2)
    replay_learned(directory, validated(CONFIG), step=3)
    assert asked == [3]


@pytest.mark.parametrize(
    ("digest", "written"), [("the same", True), (None, True), ("another", False)], ids=["equal", "unknown", "different"]
)
def test_a_record_of_learning_goes_into_the_run_unless_the_weights_are_not_the_runs(
    tmp_path, monkeypatch, digest, written
):
    directory = recorded(tmp_path / "run", steps=3)
    if digest:
        directory.append_json("events.jsonl", broadcast(2, digest))
    directory.append_json("events.jsonl", broadcast(3, "of another step"))
    asked = learned_again(monkeypatch)
    done, place = replay_learned(directory, validated(CONFIG), step=2)
    assert asked == [2] and done.differs is not written
    assert place == (directory.path("learned/step-000002.arrow") if written else None)
    assert directory.names("learned") == (["step-000002.arrow"] if written else [])
    _, place = replay_learned(directory, validated(CONFIG), step=2, out=str(tmp_path / "own.arrow"))
    assert place == str(tmp_path / "own.arrow")
    assert read_learned((tmp_path / "own.arrow").read_bytes()).policy_version == 1
    with pytest.raises(ConfigError, match=r"own.arrow' exists"):
        replay_learned(directory, validated(CONFIG), step=2, out=place)


def test_a_step_whose_checkpoint_is_kept_needs_no_trajectories_before_it(tmp_path, monkeypatch):
    directory = recorded(tmp_path, steps=9)
    asked = learned_again(monkeypatch)
    for step in (3, 6):
        directory.write_file(f"checkpoints/step-{step:06d}/manifest.json", b"{}")
    directory.write_json(PRUNED, {"steps": 4})
    replay_learned(directory, validated(CONFIG), step=7)
    assert asked == [7]
    with pytest.raises(ConfigError, match=r"steps 1 to 4 any more .* a replay needs those from step 4 on"):
        replay_learned(directory, validated(CONFIG), step=6)
    with pytest.raises(ConfigError, match=r"--learned=10: .* recorded steps 1 to 9"):
        replay_learned(directory, validated(CONFIG), step=10)


def learned_again(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that a learner which finds nothing is asked for; its weights are `the same`."""
    asked: list[int] = []

    async def learned(config, run_dir, ledger, *, address):
        asked.append(ledger.version)
        return written_learned([], policy_version=ledger.version - 1), "the same", {"processor": "AVX512"}

    monkeypatch.setattr(replaying, "_learned", learned)
    return asked


class NoSeats(Exception):
    """Ends the replay where Ray would begin."""


def test_a_replay_asks_for_no_gpu_of_a_reference_that_scored_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    @contextlib.asynccontextmanager
    async def seats(placement, *, start_s, events):
        asked.extend(bundle.name for bundle in placement.bundles)
        raise NoSeats
        yield

    monkeypatch.setattr(replaying, "connected", lambda address: contextlib.nullcontext())
    monkeypatch.setattr(start_up, "seats", seats)
    monkeypatch.setattr(start_up, "available", lambda elastic: ClusterResources(nodes=(Node(cpus=4.0),)))
    directory = recorded(tmp_path, steps=1)
    values = {
        "model": {"path": "m"},
        "prompts": "file",
        "algorithm": {"kl": {"loss": {"coefficient": 0.04}}},
        "reference": {"gpus": 1},
    }
    with pytest.raises(NoSeats):
        replay(directory, validated(values))
    assert asked == ["learner-0"]


def test_no_local_folder_is_made_of_an_object_stores_address():
    with pytest.raises(ConfigError, match=r"--out='s3://bucket/w' is in an object store; name a local path"):
        replaying._check_ends(None, "s3://bucket/w")

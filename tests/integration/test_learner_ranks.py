"""Two learner ranks (FSDP2 over gloo, a process each) compute what one computes, and restore each other's checkpoints."""

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.testing import assert_close
from transformers import Qwen3Config, Qwen3ForCausalLM

from cluster.record.storage import Storage
from learner.checkpoint.manifest import BLOCK_BYTES, state_name
from learner.checkpoint.places import Place
from learner.checkpoint.reading import checkpoints as checkpoints_below
from learner.checkpoint.reading import read_manifest, verify
from tests.integration.learned import NUM_STEPS, OPTIONS, assert_learned_alike, learned, options_of
from tests.integration.ranks import Ranks
from tests.models import make_tiny_model, make_tokenizer
from tests.object_store import AWS, s3
from tests.store_proxy import Fault, Proxy

pytestmark = pytest.mark.timeout(900)  # for two ranks that compile kernels at once, with nothing kept from before


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as pair:
        yield pair


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def learned_once(ranks: Ranks, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """What so many ranks learn by the options of that name: once for all tests that compare with it. One rank compiles nothing, and two
    trace what is to be compiled: test_compiling.py proves that one compiles it well."""

    @functools.cache
    def learn(name: str, *, num_ranks: int) -> Any:
        folder = tmp_path_factory.mktemp(name)
        options = options_of(name, folder) | ({"compile": False} if num_ranks == 1 else {"traces_alone": True})
        return learned(ranks, folder, model, num_ranks=num_ranks, **options)

    return learn


class Saved(NamedTuple):
    whole: Any
    """What two ranks learned in all steps."""
    checkpoints: Path
    """Of step 3 alone, which they wrote beside the steps after it."""


@pytest.fixture(scope="module")
def saved(ranks: Ranks, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    step = folder / "checkpoints" / "step-000003"
    whole = learned(
        ranks, folder, model, num_ranks=2, until=3, save=str(step), beside=NUM_STEPS - 3, algorithm=AVERAGED
    )
    assert whole["errors"] == [None, None]
    return Saved(whole, step.parent)


def test_a_rank_that_loads_never_holds_the_whole_model(ranks: Ranks, tmp_path: Path):
    layers = Qwen3Config(
        vocab_size=128, hidden_size=512, intermediate_size=2048, num_hidden_layers=25, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(layers).to(torch.bfloat16).save_pretrained(tmp_path / "large")
    make_tokenizer().save_pretrained(tmp_path / "large")

    def loaded(model: Path) -> list[Any]:
        config = {
            "model": {"path": str(model), "dtype": "float32"},
            "prompts": "file",
            "num_steps": 1,
            "learner": {"num_ranks": 2, "num_threads": 1, "timeout_s": 240, "max_tokens_per_micro_batch": 40},
        }
        return ranks.do("load", config=config)

    loaded(make_tiny_model(tmp_path / "tiny"))  # what libraries keep for themselves, 100 MB, comes with the first model
    for rank in loaded(tmp_path / "large"):
        assert rank["loading"] == "streamed"
        # Its float32 shards, and what loading and a first pass need at a time, which was 60 to 95 MB. All of it would be 200 MB more.
        assert rank["whole_bytes"] > 390e6 and rank["grown_bytes"] < rank["whole_bytes"] / 2 + 160e6


SHARED = ("bfloat16-checkpointed", "critic", "lora", "distillation", "several-updates", "sft")
"""Whose passes two ranks share as well."""
AVERAGED = {"proximal": "ewma", "corrections": ["decoupled"]}
"""An algorithm whose checkpoints have an average of the weights too."""


@pytest.mark.parametrize(
    ("name", "sequence_parallel_size"), [*((name, 1) for name in OPTIONS), *((name, 2) for name in SHARED)]
)
def test_two_ranks_compute_what_one_computes(
    ranks: Ranks,
    model: Path,
    learned_once: Callable[..., Any],
    tmp_path: Path,
    name: str,
    sequence_parallel_size: int,
):
    options, one = options_of(name, tmp_path), learned_once(name, num_ranks=1)
    if sequence_parallel_size == 1:
        two = learned_once(name, num_ranks=2)
    else:
        two = learned(ranks, tmp_path, model, num_ranks=2, sequence_parallel_size=sequence_parallel_size, **options)
    assert ("learner/critic_gradient_norm" in one["reports"][0]) == ("value" in options.get("algorithm", {}))
    assert_learned_alike(two, one, is_half=options.get("dtype") == "bfloat16")


@pytest.mark.exhaustive
@pytest.mark.parametrize("sequence_parallel_size", [1, 2])
def test_two_ranks_compute_with_kernels_of_the_compiler_what_one_computes_without(
    ranks: Ranks, model: Path, learned_once: Callable[..., Any], tmp_path: Path, sequence_parallel_size: int
):
    options = options_of("compiled-checkpointed", tmp_path)
    two = learned(ranks, tmp_path, model, num_ranks=2, sequence_parallel_size=sequence_parallel_size, **options)
    assert_learned_alike(two, learned_once("compiled-checkpointed", num_ranks=1), is_half=False)


def test_a_checkpoint_of_two_ranks_is_resumed_by_one_and_back(ranks: Ranks, model: Path, saved: Saved, tmp_path: Path):
    whole, checkpoints = saved
    for num_ranks in (1, 2):
        resumed = learned(
            ranks,
            tmp_path / f"resumed-{num_ranks}",
            model,
            num_ranks=num_ranks,
            restore=str(checkpoints),
            algorithm=AVERAGED,
        )
        assert_weights_are_those_of_two(whole, resumed, num_ranks=num_ranks)
    # Ranks that share passes go on with it too, and leave what others go on with.
    later = str(tmp_path / "checkpoints" / "step-000004")
    shared = {"num_ranks": 2, "sequence_parallel_size": 2, "algorithm": AVERAGED}
    learned(ranks, tmp_path / "shared", model, until=4, restore=str(checkpoints), save=later, **shared)
    restore = str(tmp_path / "checkpoints")
    resumed = learned(ranks, tmp_path / "unshared", model, num_ranks=1, restore=restore, algorithm=AVERAGED)
    assert resumed["restored"] == [{"policy_version": 4}]
    assert_weights_are_those_of_two(whole, resumed, num_ranks=1)


def assert_weights_are_those_of_two(whole: Any, resumed: Any, *, num_ranks: int) -> None:
    for name, tensor in whole["weights"].items():
        # On as many ranks bit for bit; on others sums are taken in another order.
        exact = num_ranks == 2
        assert_close(resumed["weights"][name], tensor, rtol=0 if exact else 1e-3, atol=0 if exact else 5e-5)


def test_two_ranks_save_beside_training_what_they_save_when_it_waits(ranks: Ranks, model: Path, tmp_path: Path):
    def saved(name: str, **options: Any) -> tuple[Any, dict[str, bytes]]:
        folder = tmp_path / name / "checkpoints" / "step-000002"
        found = learned(ranks, tmp_path / name, model, num_ranks=2, until=2, save=str(folder), beside=2, **options)
        assert found["errors"] == [None, None]
        files = (path for path in folder.rglob("*") if path.is_file())
        return found, {str(path.relative_to(folder)): path.read_bytes() for path in files}

    beside, copies = saved("beside")
    waiting, at_once = saved("waiting", asynchronous=False)
    full, without_room = saved("full", without_room=1)
    assert (beside["are_beside"], waiting["are_beside"], full["are_beside"]) == ([True] * 2, [False] * 2, [False] * 2)
    assert copies == at_once == without_room and len(copies) > 4
    assert all(torch.equal(tensor, waiting["weights"][name]) for name, tensor in beside["weights"].items())


def test_two_ranks_that_rest_after_each_step_learn_the_same_bits(
    ranks: Ranks, model: Path, learned_once: Callable[..., Any], tmp_path: Path
):
    """Shards are emptied in place and filled again: FSDP2 and the optimizer refer to them all the time."""
    awake = learned_once("float32", num_ranks=2)
    rested = learned(ranks, tmp_path / "rested", model, num_ranks=2, rests=True)
    assert awake["at_rest"] == [[], []] and rested["at_rest"] == [[0] * 5] * 2
    losses = [[report["learner/loss"] for report in found["reports"]] for found in (awake, rested)]
    assert losses[0] == losses[1] and awake["canary"] == rested["canary"]
    assert all(torch.equal(tensor, rested["weights"][name]) for name, tensor in awake["weights"].items())


def test_two_ranks_save_in_an_object_store_what_they_save_on_a_disk_and_any_number_restores_it(
    ranks: Ranks, model: Path, saved: Saved, tmp_path: Path
):
    on_disk = saved.checkpoints / "step-000003"
    with s3("ranks") as proxy:
        options = {"environment": {**AWS, "AWS_ENDPOINT_URL": proxy.url}, "algorithm": AVERAGED}
        checkpoints = "s3://ranks/run/checkpoints"
        url = f"{checkpoints}/step-000003"
        first = learned(ranks, tmp_path / "first", model, num_ranks=2, until=3, save=url, beside=1, **options)
        assert first["errors"] == [None, None] and first["are_beside"] == [True, True]
        files = [str(path.relative_to(on_disk)) for path in on_disk.rglob("*") if path.is_file()]
        files.remove("manifest.json")
        stored = Storage(f"{url}/{json.loads(Storage(url).read_text('manifest.json'))['folder']}")
        assert all(stored.read_file(name).to_pybytes() == (on_disk / name).read_bytes() for name in files)
        for num_ranks in (1, 2):
            resumed = learned(
                ranks, tmp_path / f"{num_ranks}", model, num_ranks=num_ranks, restore=checkpoints, **options
            )
            assert_weights_are_those_of_two(saved.whole, resumed, num_ranks=num_ranks)


@pytest.fixture(params=["disk", "store"])
def checkpoints(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, dict[str, str], Proxy | None]]:
    """Where checkpoints go: a folder or URL, the environment in which ranks find it, and the store's proxy."""
    if request.param == "disk":
        yield str(tmp_path / "checkpoints"), {}, None
        return
    with s3("checkpoints") as proxy:
        yield f"s3://checkpoints/{tmp_path.name}", {**AWS, "AWS_ENDPOINT_URL": proxy.url}, proxy


def test_a_rank_that_restores_reads_its_own_rows_and_of_another_ranks_file_what_is_shared(
    ranks: Ranks, tmp_path: Path, checkpoints: tuple[str, dict[str, str], Proxy | None]
):
    """That is the header, and in rank 0's file the optimizer's step counts: a block each."""
    where, environment, _ = checkpoints
    model = make_tiny_model(tmp_path / "model", hidden_size=768)
    options = {"num_ranks": 2, "until": 1, "environment": environment}
    saved = learned(ranks, tmp_path / "first", model, save=f"{where}/step-000001", **options)
    resumed = learned(ranks, tmp_path / "resumed", model, restore=where, **options)
    assert saved["errors"] == [None, None] and resumed["restored"] == [{"policy_version": 1}] * 2
    assert_weights_are_those_of_two(saved, resumed, num_ranks=2)
    files = [state_name(rank, 2) for rank in range(2)]
    read = [{file: [start for name, start, _ in reads if name == file] for file in files} for reads in resumed["reads"]]
    whole = [*range(0, read_manifest(Place.of(f"{where}/step-000001")).files[files[0]].size_bytes, BLOCK_BYTES)]
    assert len(whole) > 4
    assert [sorted(read[rank][files[rank]]) for rank in range(2)] == [whole, whole]
    assert read[0][files[1]] == [0]
    assert read[1][files[0]][0] == 0 and len(read[1][files[0]]) == 2


def test_a_save_that_fails_on_one_rank_fails_on_both_and_leaves_the_one_before(
    ranks: Ranks, model: Path, tmp_path: Path, checkpoints: tuple[str, dict[str, str], Proxy | None]
):
    where, environment, proxy = checkpoints
    options = {"num_ranks": 2, "environment": environment}
    learned(ranks, tmp_path / "first", model, until=1, save=f"{where}/step-000001", **options)
    if proxy is not None:
        proxy.fault = _refuse_uploads_of(state_name(1, 2))
    full_disk = 1 if proxy is None else None
    for beside in (0, 2):
        failed = learned(
            ranks,
            tmp_path / f"failed-{beside}",
            model,
            until=2,
            restore=where,
            save=f"{where}/step-000002",
            beside=beside,
            full_disk=full_disk,
            **options,
        )
        other, own = failed["errors"]
        assert "step-000002 was not saved: " in own and other == own, "whichever is read says why"
        assert failed["are_beside"] == [True, True] and failed["restored"] == [{"policy_version": 1}] * 2
    assert [str(place) for place in checkpoints_below(Storage(where))] == [f"{where}/step-000001"]
    verify(Place.of(f"{where}/step-000001"))
    if proxy is not None:
        proxy.fault = lambda method, path, number: None
    saved = learned(ranks, tmp_path / "saved", model, until=2, restore=where, save=f"{where}/step-000002", **options)
    assert saved["errors"] == [None, None]
    assert verify(Place.of(f"{where}/step-000002")).policy_version == 2


def _refuse_uploads_of(file: str) -> Fault:
    return lambda method, path, number: "403:AccessDenied" if method in ("PUT", "POST") and file in path else None


def test_a_save_that_cannot_begin_fails_on_every_rank_and_none_waits_for_another(
    ranks: Ranks, model: Path, tmp_path: Path
):
    (tmp_path / "file").write_text("where a folder should be")
    saved = str(tmp_path / "file" / "step-000001")
    found = learned(ranks, tmp_path / "run", model, num_ranks=2, until=1, save=saved)
    assert len(found["errors"]) == 2
    assert all("step-000001 was not saved" in error for error in found["errors"])

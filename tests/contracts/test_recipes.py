"""Recipes for GPUs that nobody has here: each fits on the hardware that its comment names, and on nothing smaller."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from deploy.config.loading import load
from deploy.preflight import check_assumed, hardware
from tests.model_shapes import SHAPES, write

ELASTIC = "deploy/runs/gpu.yaml"
RECIPES = [ELASTIC, *map(str, sorted(Path("deploy/runs/recipes").glob("*.yaml")))]
PAGE = Path("docs/recipes.md").read_text(encoding="utf-8")
PUBLISHED = {"0.5b": 0.49, "1.5b": 1.78, "7b": 7.62, "8b": 8.0, "32b": 32.8, "70b": 70.6}
"""Billions of parameters, by the size in a model's name."""


def _assumed(recipe: str) -> str:
    found = re.search(r"^# assumes (\S+)$", Path(recipe).read_text(encoding="utf-8"), re.MULTILINE)
    assert found, f"{recipe} does not say what it assumes"
    return found[1]


@pytest.fixture(scope="module")
def configs(tmp_path_factory) -> dict[str, RunConfig]:
    """By recipe, with folders that hold a config.json in place of the models' names."""
    folder = tmp_path_factory.mktemp("shapes")
    for name in SHAPES:
        write(name, folder / name)
    return {recipe: _local(load(recipe, []), folder) for recipe in RECIPES}


def _local(config: RunConfig, folder: Path) -> RunConfig:
    models = {
        name: each.model_copy(update={"path": str(folder / each.path)}) for name, each in config.reward.models.items()
    }
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": str(folder / config.model.path)}),
            "reward": config.reward.model_copy(update={"models": models}),
        }
    )  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_fits_on_the_hardware_that_it_assumes_and_says_that_nobody_ran_it(recipe, configs):
    shown = {
        (section, name): value
        for section, name, value in check_assumed(configs[recipe], hardware.parse([_assumed(recipe)])).rows
    }
    assert "not yet run on hardware" in Path(recipe).read_text(encoding="utf-8")
    size = next(name for name in PUBLISHED if f"-{name}" in str(configs[recipe].model.path).lower())
    billions = float(shown["memory", "parameters"].split()[0])
    assert billions == pytest.approx(PUBLISHED[size], rel=0.03)
    assert _row(recipe, configs[recipe], shown) in PAGE.splitlines()  # fmt: skip


def _row(recipe: str, config: RunConfig, shown: dict[Any, str]) -> str:
    """The recipe's line in docs/recipes.md."""
    scorers = [
        value
        for (section, name), value in shown.items()
        if section == "memory" and name[:9] in ("reference", "reward_mo")
    ]
    on_cpus = "; on CPUs" if scorers and not config.reference.gpus else ""
    cells = (
        f"`{recipe.removeprefix('deploy/runs/')}`",
        f"`{load(recipe, []).model.path}`",
        f"`{_assumed(recipe)}`",
        shown["batch", "trajectories per step"].rpartition("= ")[2],
        f"{config.learner.num_ranks}",
        shown["memory", "learner rank"].partition(":")[0],
        f"{config.rollout.num_workers}" + (f" x {config.rollout.tensor_parallel_size}" if config.rollout.tensor_parallel_size > 1 else ""),
        shown["memory", "engine, each GPU"].rpartition(": ")[2].removesuffix(" at once"),
        "; ".join(scorers) + on_cpus or "none",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def test_a_recipes_reward_model_is_pinned_or_a_folder_that_a_comment_says_how_to_make():
    found = [
        (Path(recipe).read_text(encoding="utf-8"), each)
        for recipe in RECIPES
        for each in load(recipe, []).reward.models.values()
    ]
    assert found
    for text, model in found:
        assert model.revision or f"hf download {model.path} --local-dir {model.path}`" in text


@pytest.mark.parametrize("recipe", RECIPES[1:])
def test_half_of_the_gpus_is_refused_with_a_way_out(recipe, configs):
    whole = hardware.parse([_assumed(recipe)])
    with pytest.raises(ConfigError, match=r"GPUs asked for, the cluster has \d+; use fewer ranks or workers"):
        check_assumed(configs[recipe], replace(whole, gpus=whole.gpus // 2))


def test_half_of_the_gpus_leaves_workers_of_the_elastic_recipe_to_later_nodes(configs):
    whole = hardware.parse([_assumed(ELASTIC)])
    rows = check_assumed(configs[ELASTIC], replace(whole, gpus=whole.gpus // 2)).rows
    assert ("placement", "note", "2 more rollout worker(s) join when nodes do") in rows


@pytest.mark.parametrize("recipe", RECIPES)
def test_half_of_a_gpus_memory_is_refused_with_a_way_out(recipe, configs):
    whole = hardware.parse([_assumed(recipe)])
    with pytest.raises(ConfigError, match=r"lower learner.max_tokens_per_micro_batch|lower model.max_context"):
        check_assumed(configs[recipe], replace(whole, gpu_bytes=whole.gpu_bytes // 2))

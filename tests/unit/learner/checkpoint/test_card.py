from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from cluster.contracts.config import RunConfig
from cluster.contracts.provenance import Provenance
from learner.checkpoint.card import model_card
from learner.checkpoint.manifest import MODEL
from learner.checkpoint.places import Place
from learner.checkpoint.reading import verify
from learner.learner import Learner
from tests.unit.learner.trajectories import make_config

BEFORE = {"eval/reward": 0.25, "eval/reward_stderr": 0.0625, "eval/accuracy": 0.5, "eval/num_prompts": 64.0}
AFTER = {"eval/reward": 0.75, "eval/accuracy": 0.875, "eval/accuracy_stderr": 0.03125, "eval/num_prompts": 64.0}
HELD_OUT = {"prompts": {"name": "dataset", "path": "org/questions", "split": "test"}, "num_prompts": 64}


def run(**sections: Any) -> RunConfig:
    named = {"model": {"path": "Qwen/Qwen2.5-0.5B-Instruct"}, "prompts": {"name": "dataset", "path": "org/questions"}}
    return RunConfig.model_validate({**named, **sections})


def card(config: RunConfig, *, kind: Any = "model", version: int = 12, **told: Any) -> ModelCard:
    """As the hub reads it."""
    text = model_card(config, kind=kind, policy_version=version, provenance=Provenance(**told))
    return ModelCard(text, ignore_metadata_errors=False)


def test_the_hub_reads_where_the_model_comes_from():
    said = card(run(evaluation=HELD_OUT)).data
    assert said.base_model == "Qwen/Qwen2.5-0.5B-Instruct" and said["base_model_relation"] == "finetune"
    assert said.library_name == "transformers" and said.pipeline_tag == "text-generation"
    assert said.tags == ["treadwheel", "reinforcement-learning"] and said.datasets == ["org/questions"]
    assert said.license is None, "nobody looked it up"


def test_an_adapter_is_one_for_peft():
    said = card(run(learner={"lora": {"rank": 4}}), kind="adapter")
    assert said.data.library_name == "peft" and said.data["base_model_relation"] == "adapter"
    assert "lora" in said.data.tags and "rank 4, alpha 32" in said.text  # pyright: ignore[reportOperatorIssue]


def test_the_licence_is_that_of_the_base_models_own_card(tmp_path: Path):
    (tmp_path / "README.md").write_text("---\nlicense: other\nlicense_name: own\nlicense_link: LICENSE\n---\n# Base\n")
    said = card(run(model={"path": str(tmp_path)}))
    assert said.data.license == "other" and said.data["license_name"] == "own"
    assert "license_link" not in said.data.to_dict(), "it leads to a file that this folder has not"
    assert said.data.base_model is None and str(tmp_path.parent) not in said.content


@pytest.mark.parametrize("damaged", ["", "no front matter", "---\nlicense: [\n---\n", "---\n- a list\n---\n"])
def test_a_base_model_whose_card_says_nothing_has_no_known_licence(tmp_path: Path, damaged: str):
    (tmp_path / "README.md").write_text(damaged)
    assert "**Licence of the base:** not known here" in card(run(model={"path": str(tmp_path)})).text


def test_of_a_base_in_a_store_that_is_not_here_no_licence_is_known():
    """A report has no copy of it."""
    assert card(run(model={"path": "s3://bucket/run/checkpoints/step-000010/model"})).data.license is None


def test_numbers_stand_with_their_step_and_their_error():
    text = card(run(evaluation=HELD_OUT), evaluations={0: BEFORE, 12: AFTER}).text
    assert "| 0 | 64 | 0.250 ± 0.062 | 0.500 |" in text
    assert "| 12 | 64 | 0.750 | 0.875 ± 0.031 |" in text
    assert "`dataset` of `org/questions`; greedy, 1 completion each" in text
    assert "were not evaluated themselves" not in text


def test_weights_that_were_not_evaluated_claim_no_number_of_another_step():
    assert "Nothing was measured on held-out prompts" in card(run()).text
    text = card(run(evaluation=HELD_OUT), version=15, evaluations={0: BEFORE, 12: AFTER}).text
    assert "The last evaluation is of step 12: these weights, of step 15, were not evaluated themselves." in text


def test_a_card_says_how_the_run_was_trained_and_with_what():
    reward = {"parts": {"right": {"judge": "math_verify"}, "tidy": {"judge": "format", "weight": 0.1}}}
    config = run(reward=reward, buffer={"groups_per_step": 32, "max_off_policy_steps": 2}, seed=7)
    text = card(config, passport_digest="ab12", versions={"torch": "2.13.0", "ray": "2.60.0"}).text
    assert "`right` (`math_verify`, weight 1), `tidy` (`format`, weight 0.1)" in text
    assert (
        "32 prompts with 8 completions each, at most 1024 tokens long, at temperature 1, no token older than 2 pol"
        in text
    )
    assert "advantages `grpo`, policy loss `ppo_clip`" in text and "**Seed:** 7" in text
    assert "`ab12`" in text and "ray 2.60.0, torch 2.13.0" in text


def test_of_a_run_that_learns_from_a_record_the_card_names_no_judge_and_no_prompts_of_its_own_file():
    """Seen in review: rewards that people gave to imported rows stood on the card as those of the file's judge."""
    said = card(run(recorded="/home/me/rows.arrow", reward={"judge": "math_verify"}))
    assert "from the record `rows.arrow`: nothing was sampled" in said.text
    assert "**Rewards and prompts:** those of the record" in said.text
    assert "math_verify" not in said.content and "questions" not in said.content


def test_names_are_text_and_no_markup(tmp_path: Path):
    prompts = {"name": "file", "path": "/home/me/<img src=x>`\n# evil.jsonl"}
    text = card(run(prompts=prompts, reward={"judge": "mine:judge"})).content
    assert "<img" not in text and "\n# evil" not in text and "/home/me" not in text


def test_every_checkpoint_has_a_card_that_its_manifest_covers(model_path: Path, tmp_path: Path):
    config = make_config(model_path, checkpoint={"asynchronous": False})
    directory = tmp_path / "checkpoints" / "step-000000"
    Learner(config).save(str(directory), Provenance(evaluations={0: BEFORE}).as_extra())
    written = (directory / MODEL / "README.md").read_text()
    assert "| 0 | 64 | 0.250 ± 0.062 | 0.500 |" in written
    assert written == card(config, version=0, evaluations={0: BEFORE}).content
    assert f"{MODEL}/README.md" in verify(Place.of(directory)).files

import json
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftConfig
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoTokenizer,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedModel,
)

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from learner.checkpoint import model_folder
from learner.checkpoint.model_folder import ModelFolder
from learner.checkpoint.places import Place
from learner.checkpoint.reading import verify
from learner.learner import Learner
from learner.model.loading import skeleton
from learner.publishing import exported
from tests.models import make_tiny_model
from tests.unit.learner.trajectories import make_config


def test_large_models_are_split_into_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model_folder, "MAX_FILE_BYTES", 40)
    named = [(name, torch.full((8,), float(i))) for i, name in enumerate("abc")]
    entries = model_folder.write_weights(tmp_path, named)
    assert sorted(entries) == [
        *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    assert load_file(tmp_path / "model-00002-of-00003.safetensors")["b"].tolist() == [1.0] * 8


def test_a_file_of_weights_is_out_of_memory_before_the_next_is_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(model_folder, "MAX_FILE_BYTES", 40)
    made, num_alive = list[weakref.ref[torch.Tensor]](), list[int]()

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "abcd":
            num_alive.append(sum(each() is not None for each in made))
            tensor = torch.zeros(8)
            made.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    model_folder.write_weights(tmp_path, gathered())
    # Only the tensor that the next one does not fit beside.
    assert num_alive == [0, 1, 1, 1]


def test_a_folder_has_the_buffers_that_a_checkpoint_has(tmp_path: Path):
    """DeepSeek-V3's routers add a bias to their scores, which is no parameter."""
    model = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            moe_intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            kv_lora_rank=8,
            q_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=4,
            first_k_dense_replace=1,
        )
    )
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    bias.copy_(torch.arange(4) / 3)
    model_folder.write_weights(tmp_path, exported(model, dtype=torch.bfloat16))
    model.config.save_pretrained(tmp_path)
    again, info = DeepseekV3ForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    found = again.model.layers[1].mlp.gate.e_score_correction_bias
    assert found.dtype == torch.float32 and found.equal(bias)


@pytest.mark.parametrize("odd", [{"temperature": 0.6, "top_p": 0.9}, {"pad_token_id": -1}])
def test_generation_defaults_that_transformers_loads_and_does_not_save_are_kept(
    model_path: Path, tmp_path: Path, odd: dict[str, Any]
):
    """Seen in review: with such a base model every save failed, and the run ended without weights."""
    folder = _folder(model_path, **odd)
    folder.check()
    folder.write(tmp_path, [("a", torch.zeros(1))], policy_version=0, extra={})
    written = json.loads((tmp_path / "generation_config.json").read_text())
    assert {name: written[name] for name in odd} == odd


def test_a_configuration_has_the_rotary_frequencies_under_the_names_of_its_base_too(tmp_path: Path):
    """transformers 4 reads `rope_theta` alone, and without it computes with 10,000, without a word: seen in review, 4 nats."""
    base = make_tiny_model(tmp_path / "base")
    file = base / "config.json"
    published = json.loads(file.read_text())
    published |= {"rope_theta": 1e6, "torch_dtype": "float16", "_name_or_path": "/home/someone/a"}
    del published["rope_parameters"], published["dtype"]
    file.write_text(json.dumps(published))
    causal_lm, config = _parts(base)
    ModelFolder(causal_lm, config).write(tmp_path / "saved", [("a", torch.zeros(1))], policy_version=0, extra={})
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 1e6
    assert written["dtype"] == "float32" and not {"torch_dtype", "_name_or_path"} & written.keys()
    assert AutoConfig.from_pretrained(tmp_path / "saved").rope_parameters == causal_lm.config.rope_parameters


@pytest.mark.parametrize(("model_type", "kept"), [("b", {"old": 1}), ("another", {})])
def test_fields_that_transformers_leaves_out_are_kept_in_a_part_of_the_same_type(model_type: str, kept: dict[str, int]):
    written = {"model_type": "a", "new": 2, "text_config": {"model_type": "b", "new": 2}}
    base = {"model_type": "a", "new": 3, "text_config": {"model_type": model_type, "new": 3, "old": 1}}
    expected = {"model_type": "a", "new": 2, "text_config": {"model_type": "b", "new": 2, **kept}}
    assert model_folder.with_missing_fields(written, base) == expected


@pytest.mark.parametrize(("model_type", "kept"), [("b", {"old": 1}), ("another", {})])
def test_a_text_model_of_one_that_also_takes_images_keeps_the_fields_of_its_part(model_type: str, kept: dict[str, int]):
    base = {"model_type": "a", "vision": 3, "text_config": {"model_type": model_type, "new": 3, "old": 1}}
    written = {"model_type": "b", "new": 2}
    assert model_folder.with_missing_fields(written, base) == {"model_type": "b", "new": 2, **kept}


def test_a_model_whose_configuration_cannot_be_written_is_refused_before_it_trains(model_path: Path):
    folder = _folder(model_path)
    folder._causal_lm.config.odd = {1.5, 2.5}
    with pytest.raises(ConfigError, match=r"no checkpoint could be saved: Object of type set .* mend its config\.json"):
        folder.check()


@pytest.mark.parametrize(
    ("of_run", "saved"), [(None, "{{ 'base' }}"), ("{{ 'of the run' }}", "{{ 'of the run' }}"), ("", None)]
)
def test_a_folder_has_the_chat_template_that_the_run_sampled_with(
    tmp_path: Path, of_run: str | None, saved: str | None
):
    """Seen in review: it had the base's, and whoever served the model gave it other prompts than it was trained on."""
    base = make_tiny_model(tmp_path / "base", chat_template="{{ 'base' }}")
    folder = ModelFolder(*_parts(base, chat_template=of_run))
    folder.write(tmp_path / "saved", [("a", torch.zeros(1))], policy_version=0, extra={})
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == saved


def test_what_is_saved_names_the_base_as_the_run_does_and_not_where_this_machine_downloaded_it(tmp_path: Path):
    """Seen in review: adapters named a folder of one machine's cache. The licence is still read there."""
    base = make_tiny_model(tmp_path / "cache" / "3f9c0a1b")
    (base / "README.md").write_text("---\nlicense: mit\n---\n")
    config = make_config(base, learner={"lora": {"target_modules": ["q_proj"]}})
    learner = Learner(config, base_name="s3://bucket/run/checkpoints/step-000010/model")
    learner.save(str(tmp_path / "step-000000"), {})
    learner.finish_saving()
    adapter = tmp_path / "step-000000" / "adapter"
    described = json.loads((adapter / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == "s3://bucket/run/checkpoints/step-000010/model"
    files = ("README.md", "adapter_config.json", "adapter_model.safetensors")
    assert {f"adapter/{name}" for name in files} <= verify(Place.of(tmp_path / "step-000000")).files.keys()
    for card in (adapter / "README.md", tmp_path / "step-000000" / "model" / "README.md"):
        assert "3f9c0a1b" not in card.read_text() and "license: mit" in card.read_text()


def test_an_adapter_names_the_revision_of_its_base_by_which_peft_loads_it(model_path: Path, tmp_path: Path):
    """Seen in review: the card's own lines loaded the hub's newest commit, on which the adapter was not trained."""
    config = make_config(model_path, learner={"lora": {"target_modules": ["q_proj"]}})
    config = config.model_copy(update={"model": config.model.model_copy(update={"revision": "a" * 40})})
    causal_lm = skeleton(config.model)
    folder = ModelFolder(causal_lm, config, base_name="org/model")
    folder.write_adapter(tmp_path, [("a", torch.zeros(1))], policy_version=0, extra={})
    found = PeftConfig.from_pretrained(tmp_path)
    assert (found.base_model_name_or_path, found.revision) == ("org/model", "a" * 40)


def test_a_run_saves_although_the_folder_that_it_started_from_was_removed(tmp_path: Path):
    """Seen in review: it was another live run's checkpoint, which that run removed before the first save of this one."""
    base = make_tiny_model(tmp_path / "base")
    learner = Learner(make_config(base))
    learner._saver._thread.submit(shutil.rmtree, base).result()
    learner.save(str(tmp_path / "step-000000"), {})
    learner.finish_saving()
    assert "model/tokenizer.json" in verify(Place.of(tmp_path / "step-000000")).files


def test_a_folder_has_the_processor_files_of_a_model_that_also_takes_images(tmp_path: Path):
    """Seen in review: transformers and vLLM did not load the saved model."""
    base = make_tiny_model(tmp_path / "base")
    (base / "preprocessor_config.json").write_text('{"image_processor_type": "Gemma3ImageProcessor"}')
    causal_lm, config = _parts(base)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**size, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 128}
    vision = {**size, "image_size": 16, "patch_size": 8}
    of_images = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision))
    for model, files in ((causal_lm, []), (of_images, ["preprocessor_config.json"])):
        folder = tmp_path / type(model).__name__
        ModelFolder(model, config).write(folder, [("a", torch.zeros(1))], policy_version=0, extra={})
        assert [path.name for path in folder.glob("*processor*")] == files


def _folder(model_path: Path, **generation: Any) -> ModelFolder:
    causal_lm, config = _parts(model_path)
    assert causal_lm.generation_config is not None
    causal_lm.generation_config.update(**generation)
    return ModelFolder(causal_lm, config)


def _parts(model_path: Path, **model: Any) -> tuple[PreTrainedModel, RunConfig]:
    config = make_config(model_path)
    config = config.model_copy(update={"model": config.model.model_copy(update=model)})
    return skeleton(config.model), config

"""The model card of an exported folder: the base model, the training, the held-out scores. A pure function of configuration and provenance:
equal checkpoints have equal cards.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, Literal

import yaml

from cluster.contracts.config import ModelConfig, RunConfig
from cluster.contracts.plugins import Plugin
from cluster.contracts.prompts_config import PromptsConfig
from cluster.contracts.provenance import Provenance
from cluster.weights.model_files import model_file

NAME = "README.md"
Kind = Literal["model", "adapter"]
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_LICENSES = ("license", "license_name", "license_link")


def model_card(
    config: RunConfig, *, kind: Kind, policy_version: int, provenance: Provenance, base: ModelConfig | None = None
) -> str:
    """Markdown with the metadata that the Hugging Face hub reads. `base`: the local copy of `config.model`, if it came from a store."""
    licence = _licence_of_base(base or config.model)
    front = yaml.safe_dump(_metadata(config, licence, kind=kind), sort_keys=False, allow_unicode=True)
    sections = (
        _introduction(config, kind=kind, policy_version=policy_version),
        ("## Training", "", *_bullets(in_words(config, base=base))),
        ("## Measured", "", *_measured(config, policy_version=policy_version, provenance=provenance)),
        ("## Use", "", *_use(config, kind=kind)),
        ("## Provenance", "", *_bullets(_provenance(provenance))),
    )
    return f"---\n{front}---\n\n" + "\n\n".join("\n".join(section) for section in sections) + "\n"


def _metadata(config: RunConfig, licence: Mapping[str, str], *, kind: Kind) -> dict[str, Any]:
    is_adapter = kind == "adapter"
    metadata: dict[str, Any] = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["treadwheel", "reinforcement-learning", *(["lora"] if config.learner.lora else [])],
    }
    if (base := _hub_name(config.model.path)) is not None:
        metadata |= {"base_model": base, "base_model_relation": "adapter" if is_adapter else "finetune"}
    sources = _sources(config.prompts) if config.recorded is None else []
    if datasets := sorted({name for each in sources if (name := _data_set(each))}):
        metadata["datasets"] = datasets
    return metadata | {name: licence[name] for name in _LICENSES if name in licence}


def _licence_of_base(model: ModelConfig) -> dict[str, str]:
    """The licence fields of the base model's own card, without a relative link: its file is not in the exported folder."""
    if "://" in model.path or (card := model_file(model, NAME)) is None:
        return {}
    try:
        text = card.read_text(encoding="utf-8", errors="replace")
        found = re.match(r"---\r?\n(.*?)\r?\n---", text, flags=re.DOTALL)
        metadata = yaml.safe_load(found[1]) if found else None
    except (yaml.YAMLError, ValueError, OSError):  # PyYAML raises ValueError for an impossible date
        return {}
    texts = metadata.items() if isinstance(metadata, dict) else ()
    licence = {name: text for name, text in texts if name in _LICENSES and isinstance(text, str)}
    if not licence.get("license_link", "https://").startswith("https://"):
        del licence["license_link"]
    return licence


def _introduction(config: RunConfig, *, kind: Kind, policy_version: int) -> tuple[str, ...]:
    trained = "LoRA adapter of" if kind == "adapter" else "Weights of"
    return (
        f"# {_plain(_name(config.model.path))}, trained with treadwheel, step {policy_version}",
        "",
        f"{trained} {_code(_name(config.model.path))} after {policy_version} steps of post-training with treadwheel. This card comes from "
        "the run's record: it says how the model was trained and what was measured. Its other abilities and limits were not examined.",
    )


def in_words(config: RunConfig, *, base: ModelConfig | None = None) -> Iterator[tuple[str, str]]:
    """(name, text) pairs that describe a run's training. Names from outside, such as paths, are in backticks. `base`: see `model_card`."""
    licence = _licence_of_base(base or config.model)
    algorithm, optimizer = config.algorithm, config.optimizer
    revision = f", revision {_code(config.model.revision)}" if config.model.revision else ""
    yield "Base model", f"{_code(_name(config.model.path))}{revision}, trained as {config.model.dtype}"
    yield "Licence of the base", _code(licence["license"]) if "license" in licence else "not known here; look it up"
    yield "Algorithm", ", ".join(_algorithm(config))
    yield "One step", _step(config)
    yield "Optimizer", f"AdamW, learning rate {optimizer.learning_rate:g}, {optimizer.schedule} schedule"
    if (lora := config.learner.lora) is not None:
        yield "LoRA", f"rank {lora.rank}, alpha {lora.alpha:g}"
    if config.recorded is None:
        yield "Rewards", ", ".join(_rewards(config))
        yield "Prompts", ", ".join(map(_source_text, _sources(config.prompts)))
    else:
        yield "Rewards and prompts", "those of the record"
    yield "Seed", f"{config.seed}{', deterministic' if config.deterministic else ''}"
    if algorithm.sft is not None:
        yield "Demonstrations", f"a supervised loss on {_source_text(algorithm.sft.prompts)} was added"


def _step(config: RunConfig) -> str:
    buffer, sampling = config.buffer, config.sampling
    batch = f"{buffer.groups_per_step} prompts with {buffer.trajectories_per_group} completions each"
    if config.recorded is not None:
        return f"{batch}, from the record {_code(_name(config.recorded))}: nothing was sampled"
    bound = buffer.max_off_policy_steps
    age = f"no token older than {bound} policy versions" if bound else "all sampled by the policy that learns from them"
    return f"{batch}, at most {sampling.max_tokens} tokens long, at temperature {sampling.temperature:g}, {age}"


def _algorithm(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    yield f"advantages {_code(algorithm.advantage.name)}"
    yield f"policy loss {_code(algorithm.policy_loss.name)}"
    for where, term in (("loss", algorithm.kl.loss), ("reward", algorithm.kl.reward)):
        if term is not None:
            yield f"KL to the reference in the {where} ({term.coefficient:g}, {term.estimator})"
    if (rollout := algorithm.kl.rollout) is not None:
        yield f"KL to the rollout policy in the loss ({rollout.coefficient:g}, {rollout.estimator})"
    if algorithm.entropy_coefficient:
        yield f"entropy bonus {algorithm.entropy_coefficient:g}"
    for what, plugins in (("correction", algorithm.corrections), ("filter", algorithm.filters)):
        for plugin in plugins:
            yield f"{what} {_code(plugin.name)}"
    if algorithm.value is not None:
        yield "a critic"
    if algorithm.distillation is not None:
        yield "distillation from the reference"


def _rewards(config: RunConfig) -> Iterator[str]:
    if config.reward.only_judge is not None:
        yield _code(config.reward.judge.name)
    for name, part in config.reward.parts.items():
        yield f"{_code(name)} ({_code(part.judge.name)}, weight {part.weight:g})"


def _measured(config: RunConfig, *, policy_version: int, provenance: Provenance) -> Iterator[str]:
    evaluations = sorted((version, each) for version, each in provenance.evaluations.items() if "eval/reward" in each)
    if not evaluations:
        yield "Nothing was measured on held-out prompts before these weights were saved. Training rewards are not a held-out measurement."
        return
    yield "| step | held-out prompts | mean reward | successes |"
    yield "|---:|---:|---:|---:|"
    for version, each in evaluations:
        reward, accuracy = (_estimate(each, f"eval/{name}") for name in ("reward", "accuracy"))
        yield f"| {version} | {each.get('eval/num_prompts', 0.0):.0f} | {reward} | {accuracy} |"
    yield ""
    held_out = config.evaluation
    prompts = (
        ", ".join(map(_source_text, _sources(held_out.prompts)))
        if held_out.prompts
        else "no longer in the configuration"
    )
    how = "greedy" if held_out.temperature == 0 else f"temperature {held_out.temperature:g}"
    yield f"Held-out prompts: {prompts}; {how}, {held_out.num_samples} completion{'s' * (held_out.num_samples > 1)} each. ± is one standard"
    yield f"error over prompts. A success has a reward of {held_out.success_at:g} or more."
    if (last := evaluations[-1][0]) < policy_version:
        yield f"The last evaluation is of step {last}: these weights, of step {policy_version}, were not evaluated themselves."
    yield "The numbers hold for these prompts and rewards only. Whether the base model has seen the prompts is not known."


def _estimate(numbers: Mapping[str, float], name: str) -> str:
    if (value := numbers.get(name)) is None:
        return "–"
    error = numbers.get(f"{name}_stderr")
    return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"


def _use(config: RunConfig, *, kind: Kind) -> Iterator[str]:
    yield "```python"
    if kind == "adapter":
        yield "from peft import AutoPeftModelForCausalLM"
        yield "from transformers import AutoTokenizer"
        yield ""
        yield "model = AutoPeftModelForCausalLM.from_pretrained(FOLDER)"
        yield "tokenizer = AutoTokenizer.from_pretrained(BASE)  # the base model's"
    else:
        yield "from transformers import AutoModelForCausalLM, AutoTokenizer"
        yield ""
        yield "model = AutoModelForCausalLM.from_pretrained(FOLDER)"
        yield "tokenizer = AutoTokenizer.from_pretrained(FOLDER)"
    yield "```"
    if config.model.trust_remote_code:
        yield ""
        yield "The base model needs code of its own repository, which this folder does not have: read it before you let it run."


def _provenance(provenance: Provenance) -> Iterator[tuple[str, str]]:
    digest = provenance.passport_digest
    yield (
        "Passport",
        f"SHA-256 of its mathematics: {_code(digest)}" if digest else "none was written before these weights",
    )
    if provenance.versions:
        yield "Versions", ", ".join(f"{name} {version}" for name, version in sorted(provenance.versions.items()))


def _sources(prompts: PromptsConfig) -> list[Plugin]:
    if prompts.sources:
        return list(prompts.sources.values())
    return [prompts]


def _source_text(source: Plugin) -> str:
    """The names of a source and of its data. Of a path only the last part: the rest may name a person's machine."""
    path = source.params.get("path") or source.params.get("task")
    data = _data_set(source) or (_name(path) if isinstance(path, str) else None)
    return _code(source.name) + (f" of {_code(data)}" if data else "")


def _data_set(source: Plugin) -> str | None:
    path = source.params.get("path")
    return _hub_name(path) if source.name == "dataset" and isinstance(path, str) else None


def _hub_name(path: str) -> str | None:
    """The path if it is a name on the hub, not a folder; else None."""
    return path if _HUB_NAME.fullmatch(path) and not Path(path).is_dir() else None


def _name(path: str) -> str:
    return _hub_name(path) or PurePath(path).name


def _plain(text: str) -> str:
    """One line without characters that mean something in Markdown or HTML."""
    return re.sub(r"[^\w .,:/@+=-]", "_", text)


def _code(text: Any) -> str:
    return f"`{_plain(str(text))}`"


def _bullets(facts: Iterator[tuple[str, str]]) -> Iterator[str]:
    return (f"- **{name}:** {value}" for name, value in facts)

"""Settings of the reward: its judges, their deadlines, and the models and servers that they ask."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from cluster.contracts.plugins import Plugin
from cluster.contracts.settings import Layout, Mathematics, NumActors, Resources, Section

_DEFAULT = Plugin(name="exact_match")
_TAKEN = ("mean", "num_errors", "num_timeouts", "environment", "earned")
"""Names of metrics of the whole reward (`reward/mean`), and of the parts that come from environments."""
_ASKING = ("llm_judge", "pairwise")
"""Judges that ask language models by a rubric."""


class RewardPart(Section):
    judge: Mathematics[Plugin]
    """As `reward.judge`."""
    weight: Mathematics[float] = 1.0
    """Factor of this part in the reward, which is the weighted sum of all parts. With 0 the part is measured and rewards nothing."""
    timeout_s: Resources[PositiveFloat | None] = None
    """None is `reward.timeout_s`."""
    max_concurrency: Resources[PositiveInt | None] = None
    """None is `reward.max_concurrency`."""
    cache: Resources[bool | None] = None
    """Whether verdicts are kept in the run directory, so that the same question is asked only once, also in a resumed run. None: as the
    judge declares (`remote`, `llm_judge` and `pairwise` cache). A judge with random answers then repeats its first one."""
    on_failure: Mathematics[Literal["trajectory", "part"]] = "trajectory"
    """Consequence of a failure of this part. `trajectory`: the reward of that trajectory fails. `part`: the part is left out for the whole
    group, and the other weights stay as they are. It is never left out for one trajectory alone, whose reward would then not compare with
    its group's."""


class RewardModelConfig(Section):
    """A transformers sequence classifier (`...ForSequenceClassification`), frozen, in its own actor. Its repository's code is never run."""

    path: Mathematics[str]
    """A Hugging Face folder, or a hub name with a commit as `revision`."""
    revision: Mathematics[str | None] = None
    """A commit of the hub, 40 hexadecimal digits. A branch or tag may later point to another model."""
    dtype: Mathematics[Literal["float32", "bfloat16"]] = "bfloat16"
    """Compute type of the backbone. The head always computes in float32."""
    text: Mathematics[Literal["messages", "prompt_and_completion", "completion"]] = "messages"
    """The model's input, encoded by its own tokenizer. `messages`: prompt and completion as chat messages, formatted by its chat template.
    `prompt_and_completion` and `completion`: plain text plus the tokenizer's special tokens. A text longer than the model's context is a
    failed reward; nothing is truncated."""
    cpus: Layout[PositiveFloat] = 1.0
    """As `learner.cpus_per_rank`."""
    gpus: Layout[NonNegativeFloat] = 0.0
    """GPUs of the model, or a share of one."""
    num_threads: Layout[PositiveInt | None] = None
    """Torch threads; None is the number of `cpus`, rounded up."""
    max_tokens_per_micro_batch: Layout[PositiveInt] = 16384
    """Tokens in one forward pass, padding included."""
    timeout_s: Resources[PositiveFloat] = 600.0
    """Deadline for the scores of one group. A model that misses it is restarted."""


class JudgeServerConfig(Section):
    """A frozen language model behind vLLM's own server, for judges such as `llm_judge`. Its repository's code is never run."""

    path: Mathematics[str]
    """A Hugging Face folder, or a hub name with a commit as `revision`."""
    revision: Mathematics[str | None] = None
    """A commit of the hub, as for a reward model."""
    dtype: Mathematics[Literal["float32", "bfloat16"]] = "bfloat16"
    max_model_len: Mathematics[PositiveInt | None] = None
    """Limit of question and answer together, in tokens; None takes the model's own limit."""
    num_servers: Layout[NumActors] = 1
    """Number of equal servers, which are asked in turn."""
    cpus: Layout[PositiveFloat] = 1.0
    """CPUs of each server, as `learner.cpus_per_rank`."""
    gpus: Layout[NonNegativeFloat] = 0.0
    """GPUs of each server. A model is split over several (tensor parallel)."""
    num_threads: Layout[PositiveInt | None] = None
    """As `rollout.num_threads`."""
    max_concurrent_sequences: Layout[PositiveInt] = 64
    """Maximum number of questions in one engine step."""
    kv_cache_bytes: Layout[PositiveInt] = 1024**3
    """Size of the key-value cache of a server without a GPU."""
    gpu_memory_utilization: Layout[Annotated[float, Field(gt=0, le=1)]] = 0.85
    """Share of its GPUs' memory that a server uses."""

    @model_validator(mode="after")
    def _require_whole_gpus_to_split_over(self) -> "JudgeServerConfig":
        if self.gpus > 1 and not self.gpus.is_integer():
            raise ValueError(
                f"gpus={self.gpus:g}: a model is split over whole GPUs; use {int(self.gpus)} or {int(self.gpus) + 1}"
            )
        return self


class RewardConfig(Section):
    judge: Mathematics[Plugin] = _DEFAULT
    """A name below actors.rewards, or a function or class of yours as 'my_package.module:name'. The only judge, unless there are `parts`.
    The default judges only single turns: environments reward their episodes themselves."""
    environment_weight: Mathematics[float] = 1.0
    """Weight of the reward that an environment returns, which is the part `environment`. The rewards that an episode earns on its way, the
    component `earned`, are added without a weight."""
    parts: Mathematics[dict[str, RewardPart]] = Field(default={})
    """Named parts, whose weighted sum is the reward: `{right: {judge: math_verify}, tidy: {judge: format, weight: 0.1}}`. Each part is a
    metric `reward/<part>`."""
    by_source: Mathematics[dict[str, tuple[str, ...]]] = Field(default={})
    """The parts that judge the prompts of each source: `{gsm8k: [right, tidy], chat: [style]}`. The other parts are not computed for them.
    A source without an entry is an error. Empty: all parts judge all prompts."""
    source_column: Mathematics[str] = "source"
    """The prompt's column with its source's name, the key of `by_source`. With several `prompts.sources` it is filled with their names."""
    models: Mathematics[dict[str, RewardModelConfig]] = Field(default={})
    """Reward models by name: `{helpful: {path: org/model, revision: 5a3b...}}`. The judge `{name: reward_model, model: helpful, label:
    NAME}` reads one output of a model. Several parts may read several labels of one forward pass."""
    servers: Mathematics[dict[str, JudgeServerConfig]] = Field(default={})
    """Language models that the run serves for its judges, by name: `{grader: {path: org/model, gpus: 1}}`. `llm_judge` and `pairwise` ask
    one with `server: grader`. A judge of yours gets the URLs of all servers in its parameter `servers`."""
    num_services: Resources[NumActors] = 1
    """Number of reward services. Each has its own processes for every judge; a group goes to the service with the fewest groups.
    `treadwheel scale` changes the number during the run. The synchronous judges of each service use at most its machine's cores divided by
    this number, also in a service that joined later."""
    cpus_per_service: Layout[PositiveFloat] = 0.25
    """CPUs that Ray reserves to place a service, as `learner.cpus_per_rank`; they do not limit its judges."""
    gpus_per_service: Layout[NonNegativeFloat] = 0.0
    """GPUs of each service, for judges that compute on one."""
    timeout_s: Resources[PositiveFloat] = 30.0
    """Deadline for the reward of one trajectory, or of a group if the judge takes whole groups. Beyond it the status is `timeout`."""
    hold_s: Resources[NonNegativeFloat] = 600.0
    """Longest outage of a service that a judge calls. Its groups wait that long; then the run stops and names the service. The default is
    long enough for the restart of a server that loads a model. 0 stops at the first failure."""
    max_concurrency: Resources[PositiveInt] = 64
    """Maximum number of trajectories that a judge judges at the same time."""
    max_memory_bytes: Resources[PositiveInt] = 8 * 1024**3
    """Memory limit of a judge's process. Beyond it the judge gets a MemoryError."""
    env: Resources[tuple[str, ...]] = ()
    """Names of environment variables that a judge sees: `[OPENAI_API_KEY]`. It sees no others but PATH, HOME, locale and threads."""

    @property
    def judges_episodes(self) -> bool:
        """Whether judges add to the rewards of environments."""
        return bool(self.parts) or self.judge != _DEFAULT

    @property
    def only_judge(self) -> Plugin | None:
        """The judge of the short form; None with `parts`."""
        return None if self.parts else self.judge

    def judges(self) -> dict[str, Plugin]:
        """All judges, by their settings below `reward`."""
        return {f"parts.{name}.judge": part.judge for name, part in self.parts.items()} or {"judge": self.judge}

    def rubrics(self) -> dict[str, str]:
        """Rubric files of the shipped judges, by the judge's setting."""
        judges = {setting: judge for setting, judge in self.judges().items() if judge.name in _ASKING}
        return {setting: str(judge.params["rubric"]) for setting, judge in judges.items() if "rubric" in judge.params}

    def models_for(self, columns: Mapping[str, Any]) -> list[str]:
        """Reward models that judge a prompt with these columns; none for a source without a recipe."""
        names = self.by_source.get(str(columns.get(self.source_column)), ()) if self.by_source else self.parts
        judges = [self.parts[name].judge for name in names] if self.parts else [self.judge]
        return list(dict.fromkeys(model for judge in judges if (model := model_of(judge)) is not None))

    @property
    def deadline_s(self) -> float:
        """Longest time for one trajectory, if its parts are judged one after another."""
        return sum(part.timeout_s or self.timeout_s for part in self.parts.values()) or self.timeout_s

    @model_validator(mode="after")
    def _require_parts_that_act(self) -> "RewardConfig":
        if self.parts and self.judge != _DEFAULT:
            raise ValueError(
                f"judge={self.judge.name!r} with parts {', '.join(self.parts)}: give the judge a name among the parts, or leave one out"
            )
        for name in self.parts:
            if not name.replace("_", "").isalnum() or name in _TAKEN:
                raise ValueError(
                    f"parts.{name}: a part's name has letters, digits and _ only, and is none of {', '.join(_TAKEN)}, which are metrics of "
                    "the whole reward; rename it"
                )
        return self

    @model_validator(mode="after")
    def _require_models_and_servers_that_are_asked(self) -> "RewardConfig":
        judges = self.judges()
        _check_names("models", self.models, {f"{setting}.model": model_of(judge) for setting, judge in judges.items()})
        asked = {f"{setting}.server": server_of(judge) for setting, judge in judges.items()}
        # A judge of the user's own may ask any server, by its parameter `servers`.
        is_known = not any(":" in judge.name for judge in judges.values())
        _check_names("servers", self.servers, asked, refuses_unasked=is_known)
        return self

    @model_validator(mode="after")
    def _require_recipes_of_parts(self) -> "RewardConfig":
        for source, names in self.by_source.items():
            unknown = [name for name in names if name not in self.parts]
            if unknown or not names:
                raise ValueError(
                    f"by_source.{source} names {unknown[0] if unknown else 'no part'}; parts are: {', '.join(self.parts) or 'none'}"
                )
            if len(set(names)) < len(names):
                raise ValueError(f"by_source.{source}={list(names)} names a part twice; set its weight instead")
        unused = [
            name for name in self.parts if self.by_source and not any(name in each for each in self.by_source.values())
        ]
        if unused:
            raise ValueError(f"parts.{unused[0]} judges no source of by_source; name it in one, or leave it out")
        return self


def model_of(judge: Plugin) -> str | None:
    """The reward model whose scores a judge reads; None for every other judge."""
    is_model = judge.name in ("reward_model", "actors.rewards.reward_model:reward_model")
    return str(judge.params.get("model")) if is_model else None


def server_of(judge: Plugin) -> str | None:
    """The name in `reward.servers` that a shipped judge asks; None for every other judge."""
    server = judge.params.get("server") if judge.name in _ASKING else None
    return None if server is None else str(server)


def _check_names(
    kind: str, there: Mapping[str, Any], asked: Mapping[str, str | None], *, refuses_unasked: bool = True
) -> None:
    """Raises ValueError for a name in `asked` (setting to name) that is not in `there`, and for a name in `there` that no judge asks."""
    for setting, name in asked.items():
        if name is not None and name not in there:
            raise ValueError(f"{setting}={name!r} is not among reward.{kind}, which has: {', '.join(there) or 'none'}")
    for name in there:
        if not name.replace("_", "").isalnum():
            raise ValueError(f"{kind}.{name}: a name has letters, digits and _ only; rename it")
        if refuses_unasked and name not in asked.values():
            judge = "{name: reward_model, model: NAME}" if kind == "models" else "{name: llm_judge, server: NAME, ...}"
            raise ValueError(
                f"{kind}.{name} judges nothing; give a part the judge {judge.replace('NAME', name)}, or leave it out"
            )

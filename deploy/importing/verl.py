"""verl's PPO trainer: the keys of its hydra configuration."""

import math
import re
from pathlib import PurePosixPath
from typing import Any

from deploy.importing import reading
from deploy.importing.table import NO_NUMBER, NUMBER, Given, Made, Peer, Row, last_share, only, same

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_CORRECTION = "algorithm.rollout_correction"
_KWARGS, _LEGACY_KWARGS = "reward.reward_kwargs", "reward_model.reward_kwargs"
"""Settings of DAPO's reward manager. Any setting of the second section replaces all of the first."""
_MIXED_PRECISION = f"{_ACTOR}.fsdp_config.mixed_precision"
_COMPUTED = f"{_MIXED_PRECISION}.param_dtype"
_CLAMP = 20.0
"""verl's clamp on the log-ratios of losses, corrections and k3."""


def _at(section: str, /, **settings: Any) -> dict[str, Any]:
    return {f"{section}.{name}": value for name, value in settings.items()}


_OPTIM: dict[str, Any] = {
    "clip_grad": 1.0, "weight_decay": 0.01, "betas": [0.9, 0.999],
    "lr_scheduler_type": "constant", "warmup_style": None, "min_lr_ratio": 0.0,
    "lr_warmup_steps": -1, "lr_warmup_steps_ratio": 0.0,
    "optimizer": "AdamW", "optimizer_impl": "torch.optim", "override_optimizer_config": None,
}  # fmt: skip
"""Defaults of actor and critic."""

_DEFAULTS: dict[str, Any] = {
    **_at(_MODEL, path=None, hf_config_path=None, tokenizer_path=None, override_config={}, trust_remote_code=False),
    **_at(_MODEL, custom_chat_template=None, enable_gradient_checkpointing=True),
    **_at(
        _MODEL, lora_rank=0, lora_alpha=16, target_modules="all-linear", exclude_modules=None, lora_adapter_path=None
    ),
    **_at(f"{_MODEL}.mtp", enable_train=False),
    **_at(f"{_MODEL}.lora", rank=0),
    "num_prompts": None,
    **{"-m": "verl.trainer.main_ppo", "--config-name": "ppo_trainer", "--config-path": "config", "model_engine": "dp"},
    **_at("data", train_files=None, train_max_samples=-1, train_batch_size=1024, gen_batch_size=None),
    **_at("data", val_files=None, val_max_samples=-1, prompt_key="prompt", shuffle=True, seed=None),
    **_at("data", max_prompt_length=512, max_response_length=512, filter_overlong_prompts=False, truncation="error"),
    **_at("data", tokenizer=None, apply_chat_template_kwargs={}),
    **_at("data.custom_cls", path=None),
    **_at(
        "trainer", total_epochs=30, total_training_steps=None, critic_warmup=0, test_freq=-1, experiment_name="gsm8k"
    ),
    **_at("trainer", val_only=False, use_v1=True),
    **_at("trainer.v1", trainer_mode="sync"),
    **_at("trainer.v1.sampler.custom_sampler", path=None),
    **_at(_ROLLOUT, n=1, temperature=1.0, top_p=1, top_k=-1, do_sample=True, ignore_eos=False, max_model_len=None),
    **_at(_ROLLOUT, over_sample_rate=0, quantization=None, enable_rollout_routing_replay=False),
    **_at(_ROLLOUT, prompt_length=None, response_length=None, calculate_log_probs=True),
    **_at(f"{_ROLLOUT}.val_kwargs", n=1, temperature=0, top_p=1.0, top_k=-1),
    **_at(f"{_ROLLOUT}.multi_turn", enable=False, tool_config_path=None, function_tool_path=None),
    **_at(f"{_ROLLOUT}.agent", default_agent_loop="single_turn_agent", agent_loop_config_path=None),
    **_at(f"{_ROLLOUT}.agent", agent_loop_manager_class=None),
    **_at(
        _ACTOR, ppo_mini_batch_size=256, ppo_epochs=1, shuffle=False, ulysses_sequence_parallel_size=1, grad_clip=1.0
    ),
    **_at(_ACTOR, clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0, tau_pos=1.0, tau_neg=1.05),
    **_at(_ACTOR, loss_agg_mode="token-mean", loss_scale_factor=None, entropy_coeff=0),
    **_at(_ACTOR, use_kl_loss=False, kl_loss_coef=0.001, kl_loss_type="low_var_kl"),
    **_at(f"{_ACTOR}.policy_loss", loss_mode="vanilla", dro_beta=None),
    **_at(f"{_ACTOR}.router_replay", mode="disabled"),
    **_at(f"{_ACTOR}.fsdp_config", dtype="bfloat16", model_dtype="fp32", mixed_precision=None),
    **_at(f"{_ACTOR}.fsdp_config", ulysses_sequence_parallel_size=1),
    _COMPUTED: None,
    **_at(f"{_ACTOR}.fsdp_config.qat", enable=False),
    **_at(f"{_ACTOR}.qat", enable=False),
    **_at(f"{_ACTOR}.optim", lr=1e-6, num_cycles=0.5, zero_indexed_step=True, **_OPTIM),
    **_at("critic", enable=None, cliprange_value=0.5, ppo_epochs=None, ppo_mini_batch_size=None),
    **_at("critic", loss_agg_mode=None, loss_scale_factor=None),
    **_at("critic.model", path=None, trust_remote_code=False, lora_rank=0),
    **_at("critic.optim", lr=1e-5, zero_indexed_step=True, **_OPTIM),
    **_at("algorithm", adv_estimator="gae", gamma=1.0, lam=1.0, norm_adv_by_std_in_grpo=True, use_pf_ppo=False),
    **_at("algorithm", use_kl_in_reward=False, kl_penalty="kl"),
    **_at("algorithm.kl_ctrl", type="fixed", kl_coef=0.001),
    **_at("algorithm.filter_groups", enable=False, metric="reward"),
    **_at(_CORRECTION, bypass_mode=False, loss_type="ppo_clip", rollout_rs=None),
    **_at(_CORRECTION, rollout_is=None, rollout_is_threshold=2.0, rollout_is_batch_normalize=False),
    **_at("reward.custom_reward_function", path=None, name="compute_score", reward_kwargs={}),
    **_at("custom_reward_function", path=None, name=None, reward_kwargs={}),
    **_at("reward.reward_manager", name="naive", source="register"),
    **_at("reward.reward_model", enable=False),
    **_at("reward_model", reward_manager=None, reward_loop_source=None, enable=None),
    **_at(_KWARGS, max_resp_len=None),
    **_at(f"{_KWARGS}.overlong_buffer_cfg", enable=False, len=None, penalty_factor=1.0),
    **_at(_LEGACY_KWARGS, max_resp_len=None),
    **_at(f"{_LEGACY_KWARGS}.overlong_buffer_cfg", enable=False, len=None, penalty_factor=1.0),
    **_at("reward.sandbox_fusion", url=None),
    **_at("sandbox_fusion", url=None),
    **_at("distillation", enabled=False),
}

_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(
        ("trainer.total_training_steps", "num_prompts", "data.gen_batch_size", "data.train_max_samples", "data.val_max_samples",
         *(f"{each}.{name}" for each in (_KWARGS, _LEGACY_KWARGS) for name in ("max_resp_len", "overlong_buffer_cfg.len")),
         *(f"{_ACTOR}.{name}" for name in ("clip_ratio_low", "clip_ratio_high", "loss_scale_factor", "policy_loss.dro_beta")),
         *(f"{each}.optim.{name}" for each in (_ACTOR, "critic") for name in ("lr_warmup_steps", "min_lr_ratio"))), NO_NUMBER,
    ),
    **dict.fromkeys(
        (f"{_MODEL}.override_config", "data.apply_chat_template_kwargs", "custom_reward_function.reward_kwargs",
         "reward.custom_reward_function.reward_kwargs"), (dict, type(None)),
    ),
    **dict.fromkeys(("data.train_files", "data.val_files"), (str, list, type(None))),
    **dict.fromkeys(("reward.custom_reward_function.path", "custom_reward_function.path"), (str, type(None))),
    f"{_CORRECTION}.rollout_is_threshold": (*NUMBER, str), _COMPUTED: (str, int, type(None)),
    f"{_MODEL}.target_modules": (str, list),
}  # fmt: skip

_DROPPED = {
    "resources and engines have settings of their own in `learner`, `rollout` and `elastic`": (
        "*.fsdp_config.* critic.fsdp.* *.megatron.* *.strategy *micro_batch_size* *max_token_len* *use_dynamic_bsz "
        "trainer.nnodes trainer.n_gpus_per_node trainer.device trainer.balance_batch trainer.ray_wait* "
        "ray_kwargs.* transfer_queue.* *.ulysses_sequence_parallel_size *nccl_timeout *hybrid_engine "
        f"{_ROLLOUT}.nnodes {_ROLLOUT}.n_gpus_per_node {_ROLLOUT}.name {_ROLLOUT}.mode {_ROLLOUT}.*_parallel_size "
        f"{_ROLLOUT}.gpu_memory_utilization {_ROLLOUT}.free_cache_engine {_ROLLOUT}.max_num_* {_ROLLOUT}.engine_kwargs.* "
        f"{_ROLLOUT}.enable_* {_ROLLOUT}.load_format {_ROLLOUT}.layered_summon {_ROLLOUT}.multi_stage_wake_up "
        f"{_ROLLOUT}.scheduling_policy {_ROLLOUT}.checkpoint_engine.* {_ROLLOUT}.disaggregation.* {_ROLLOUT}.agent.*"
    ),
    "kernels and memory: the same numbers up to rounding": (
        "*use_torch_compile *use_remove_padding *use_fused_kernels *fused_kernel_options.* *use_liger *entropy_from_logits_* "
        "*entropy_checkpointing *pad_to_length* *use_prefix_grouper *use_shm *enable_activation_offload *tiled_mlp.* *qat.* "
        f"critic.model.enable_gradient_checkpointing {_ROLLOUT}.dtype {_ROLLOUT}.enforce_eager {_ROLLOUT}.cudagraph_* "
        f"{_ROLLOUT}.full_determinism {_ROLLOUT}.seed *.override_config.attn_implementation"
    ),
    "logging, profiling and checkpoints have settings of their own in `metrics` and `checkpoint`": (
        "*profiler* trainer.logger trainer.project_name trainer.log_val_generations trainer.*_data_dir trainer.save_freq "
        "trainer.resume_* trainer.default_* trainer.max_*_ckpt_to_keep trainer.del_local_* trainer.esi_* "
        "trainer.val_before_train "
        "trainer.checkpoint_callback_class *.checkpoint.* *calculate_entropy *calculate_sum_pi_squared skip.* "
        f"{_ROLLOUT}.disable_log_stats {_ROLLOUT}.trace.* {_ROLLOUT}.prometheus.* {_ROLLOUT}.moe_load_balance_*"
    ),
    "without effect on a single turn of text, or set by verl itself": (
        "*_target_ *.rollout_n *.data_loader_seed *.optim.total_training_steps "
        "data.image_* data.video_key data.audio_key data.reward_fn_key data.return_* data.dataloader_num_workers "
        "data.val_batch_size data.filter_overlong_prompts_workers data.validation_shuffle data.tool_config_path "
        "data.function_tool_path data.mm_processor_kwargs* data.trust_remote_code data.custom_cls.name *freeze_vision_tower "
        "*.external_lib critic.model.hf_config_path critic.model.tokenizer_path *.mtp *.mtp.* *.num_workers "
        f"*.lora.* {_KWARGS}.overlong_buffer_cfg.log {_LEGACY_KWARGS}.overlong_buffer_cfg.log "
        f"{_ROLLOUT}.logprobs_mode {_ROLLOUT}.skip_tokenizer_init {_ROLLOUT}.router_config_path "
        f"{_ROLLOUT}.quantization_config_file {_ROLLOUT}.qat {_ROLLOUT}.val_kwargs.* {_ROLLOUT}.multi_turn.* "
        "critic.model.lora_alpha critic.model.target_modules critic.model.exclude_modules "
        "critic.model.lora_adapter_path critic.model.override_config critic.model.custom_chat_template critic.shuffle "
        "data.continuous_token*"
    ),
    "details of a feature that another setting turns on": (
        "algorithm.pf_ppo.* algorithm.filter_groups.max_* algorithm.kl_ctrl.horizon algorithm.kl_ctrl.target_kl distillation.* "
        f"{_CORRECTION}.rollout_rs_threshold *.router_replay.* *.policy_loss.*cov* *.policy_loss.ppo_kl_coef trainer.v1.* "
        "reward.reward_model.* reward_model.enable_resource_pool reward_model.n_gpus_per_node reward_model.nnodes "
        "reward_model.model.* reward_model.rollout.* "
        "reward.reward_manager.module.* reward_model.reward_loop_module_path reward_model.reward_loop_class_name "
        "critic.optim.num_cycles critic.grad_clip *sandbox_fusion.*"
    ),
}

_MOVED = {
    "reward_model.overlong_buffer.*": f"write it below {_KWARGS}.overlong_buffer_cfg",
    "algorithm.rollout_is*": f"write it below {_CORRECTION}",
    f"{_ACTOR}.tis_imp_ratio_cap": f"write {_CORRECTION}.rollout_is=token, and it as rollout_is_threshold",
}

_DTYPES = dict.fromkeys((None, "bf16", "bfloat16"), "bfloat16") | dict.fromkeys(
    (32, "32", "fp32", "float32"), "float32"
)


def _model(given: Given) -> Made:
    path = given[f"{_MODEL}.path"]
    if path is None:
        given.refuse(f"{_MODEL}.path", "names no model; write its folder or hub name")
    computed, name = given[_COMPUTED], f"{_ACTOR}.fsdp_config.dtype"
    if computed not in _DTYPES:
        given.refuse(_COMPUTED, "is not supported as compute type; use bf16 or fp32")
    if name in given.values and _DTYPES.get(given[name]) != _DTYPES.get(computed):
        given.note(
            f"fsdp_config.dtype={given[name]} has no effect in verl: mixed_precision.param_dtype counts, by default bf16."
        )
    if given[f"{_ACTOR}.fsdp_config.model_dtype"] not in ("float32", "fp32"):
        given.note("fsdp_config.model_dtype: verl trains weights of this type. Here master weights are float32.")
    return {"model.path": path, "model.dtype": _DTYPES.get(computed)}


def _lora(given: Given) -> Made:
    rank = given[f"{_MODEL}.lora_rank"]
    if not rank:
        return {}
    return {
        "learner.lora": {
            "rank": rank,
            "alpha": given[f"{_MODEL}.lora_alpha"],
            "target_modules": given[f"{_MODEL}.target_modules"],
        }
    }


def _sequence_parallel(given: Given) -> Made:
    names = [f"{_ACTOR}.{each}ulysses_sequence_parallel_size" for each in ("", "fsdp_config.")]
    outer, size = given.counts(*names)
    size = outer if outer > 1 else size
    if size == 1:
        return {}
    given.note(f"learner.num_ranks: {size} is one group of ranks that share each pass. For more groups use a multiple.")
    return {"learner.sequence_parallel_size": size, "learner.num_ranks": size}


def _source(files: Any, column: str) -> dict[str, Any]:
    """The prompts of one file, or of several files as sources that are named by folder and file."""
    paths = [files] if isinstance(files, str) else [str(each) for each in files]
    if len(paths) == 1:
        return {"name": "file", "path": paths[0], "column": column}
    sources: dict[str, Any] = {}
    for path in paths:
        name = _name(path)
        while name in sources:
            name += "_"  # `a-b` and `a_b`
        sources[name] = {"name": "file", "path": path, "column": column}
    return {"sources": sources}


def _name(path: str) -> str:
    return re.sub(r"\W+", "_", str(PurePosixPath(path).with_suffix(""))).strip("_")


def _limits(given: Given) -> dict[str, Any]:
    """Limits on the length of prompts, for training and validation."""
    limits: dict[str, Any] = {"max_prompt_tokens": given["data.max_prompt_length"]}
    if given["data.filter_overlong_prompts"]:
        return limits | {"on_long_prompt": "drop"}
    if "data.truncation" in given.values and given["data.truncation"] != "left":
        given.note(
            f"data.truncation={given['data.truncation']} has no effect in verl, which truncates a long prompt at its start."
        )
    return limits | {"on_long_prompt": "truncate_start"}


def _prompts(given: Given) -> Made:
    files = given["data.train_files"]
    if not files:
        given.refuse("data.train_files", "names no data; write a Parquet file")
        return {}
    prompts = _source(files, given["data.prompt_key"])
    if "sources" in prompts:
        given.note(
            "verl draws all rows with equal probability. Here each source has a weight: set the weights in prompts.sources to the numbers "
            "of rows."
        )
    return {"prompts": prompts | _limits(given)}


def _evaluation(given: Given) -> Made:
    files, every, n = given["data.val_files"], given["trainer.test_freq"], given[f"{_ROLLOUT}.val_kwargs.n"]
    if not files:
        return {}
    temperature = given[f"{_ROLLOUT}.val_kwargs.temperature"]
    validated, trained = _nucleus(given, f"{_ROLLOUT}.val_kwargs"), _nucleus(given, _ROLLOUT)
    if temperature > 0 and validated != trained:
        given.note(
            f"verl validates with top_p={validated[0]} and top_k={validated[1]}. Here only the temperature of an evaluation is separate; "
            f"top_p and top_k are those of sampling, {trained[0]} and {trained[1]}."
        )
    made: Made = {"evaluation.prompts": _source(files, given["data.prompt_key"]) | _limits(given)}
    given.note("verl validates on all rows of val_files. Here set evaluation.num_prompts to their number.")
    made |= {"evaluation.num_samples": n, "evaluation.temperature": temperature}
    return made | ({"evaluation.every_steps": every} if every > 0 else {})


def _nucleus(given: Given, section: str) -> tuple[float, int]:
    """top_p and top_k; a top_k of 0 allows all tokens."""
    return given[f"{section}.top_p"], max(given[f"{section}.top_k"], 0)


def _batch(given: Given) -> Made:
    groups, part = given.counts("data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size")
    if groups % part:
        given.refuse(f"{_ACTOR}.ppo_mini_batch_size", f"does not divide data.train_batch_size={groups}; use a divisor")
    fetched = given["data.gen_batch_size"]
    if fetched and groups % fetched and not given["algorithm.filter_groups.enable"]:
        given.refuse(
            "data.gen_batch_size",
            f"does not divide data.train_batch_size={groups}, which verl refuses too; leave it out",
        )
    mini_batches = max(groups // part, 1)
    made: Made = {
        "buffer.groups_per_step": groups,
        "buffer.trajectories_per_group": given[f"{_ROLLOUT}.n"],
        "learner.mini_batches": mini_batches,
        "learner.epochs": given[f"{_ACTOR}.ppo_epochs"],
    }
    deals_trajectories = given[f"{_ACTOR}.shuffle"] and mini_batches > 1
    return made | ({"learner.split_by": "trajectories"} if deals_trajectories else {})


def _length(given: Given) -> int:
    """Steps of verl's learning rate schedule."""
    steps, prompts = given["trainer.total_training_steps"], given["num_prompts"]
    if steps is None and prompts is None:
        given.refuse(
            "trainer.total_training_steps",
            "is not set, so the data decides the length; set it, or give the number of rows: --set num_prompts=7473",
        )
    return max(steps or _steps_of_epochs(given), 1)


def _steps(given: Given) -> int:
    """verl ends with its schedule or its last epoch, whichever comes first."""
    length = _length(given)
    if given["num_prompts"] is not None:
        return max(min(length, _steps_of_epochs(given)), 1)
    given.note(
        f"verl also ends after trainer.total_epochs={given['trainer.total_epochs']} passes over the prompts. If that may be "
        "fewer steps, give the number of rows: --set num_prompts=7473."
    )
    return length


def _steps_of_epochs(given: Given) -> int:
    (groups,) = given.counts("data.train_batch_size")
    prompts = 0 if given["num_prompts"] is None else given.counts("num_prompts")[0]
    return given["trainer.total_epochs"] * (prompts // groups)


def _sampling(given: Given) -> Made:
    top_p, top_k = _nucleus(given, _ROLLOUT)
    if top_p < 1 or top_k > 0:
        given.note(
            "top_p, top_k: verl's learner ignores them in its log-probs. Here learner and engine both apply them."
        )
    for part in ("prompt", "response"):
        own, of_data = given[f"{_ROLLOUT}.{part}_length"], f"data.max_{part}_length"
        if own not in (None, given[of_data]):
            given.refuse(f"{_ROLLOUT}.{part}_length", f"differs from {of_data}; leave it out")
    return {
        "sampling.max_tokens": given["data.max_response_length"],
        "sampling.temperature": given[f"{_ROLLOUT}.temperature"],
        "sampling.top_p": top_p,
        "sampling.top_k": top_k,
        "sampling.ignore_eos": given[f"{_ROLLOUT}.ignore_eos"],
    }


def _reward(given: Given) -> Made:
    old, new = (f"{section}custom_reward_function" for section in ("", "reward."))
    # Each of the old settings replaces all new ones.
    section = old if any(given[f"{old}.{name}"] for name in ("path", "name", "reward_kwargs")) else new
    path, name, kwargs = (given[f"{section}.{name}"] for name in ("path", "name", "reward_kwargs"))
    if path is None:
        given.note(
            "The reward is verl's default_compute_score: install verl where judges run, or use a judge of `treadwheel list rewards`."
        )
        return {"reward.judge": {"name": "verl", "function": "verl.utils.reward_score:default_compute_score"}}
    module = PurePosixPath(path).stem
    if path.startswith("pkg://"):
        module = path.removeprefix("pkg://").replace("/", ".")
        given.note(f"The reward function is imported: install {module} where judges run.")
    else:
        file = PurePosixPath(path).name
        given.note(
            f"The reward function is imported as a module: put {file} into the folder in which you start the command, or name its folder "
            "in PYTHONPATH."
        )
    if kwargs and not all(_is_plain(name, value) for name, value in kwargs.items()):
        given.refuse(
            f"{section}.reward_kwargs", "has sections or values that are not resolved; write them as the judge's kwargs"
        )
    judge = {"name": "verl", "function": f"{module}:{name or 'compute_score'}"}
    return {"reward.judge": judge | ({"kwargs": kwargs} if kwargs else {})}


def _is_plain(name: str, value: Any) -> bool:
    """False in a section, whose names have dots, and for an interpolation."""
    return "." not in name and "${" not in str(value)


def _shaping(given: Given) -> Made:
    old, new = "reward_model.reward_manager", "reward.reward_manager.name"
    name = old if given[old] else new
    manager = given[name]
    if manager not in ("naive", "dapo"):
        given.refuse(name, "is not supported; use naive or dapo, or write it as a judge")
    kwargs = _LEGACY_KWARGS if any(name.startswith(f"{_LEGACY_KWARGS}.") for name in given.values) else _KWARGS
    buffer = f"{kwargs}.overlong_buffer_cfg"
    if not given[f"{buffer}.enable"]:
        return {}
    if manager != "dapo" or not given[f"{buffer}.len"]:
        given.refuse(f"{buffer}.enable", "acts only with reward_manager.name=dapo and a len above 0; set both")
    penalty = {"cache": given[f"{buffer}.len"], "penalty": given[f"{buffer}.penalty_factor"]}
    most = given["data.max_response_length"]
    longest = given[f"{kwargs}.max_resp_len"] or most
    if longest < most:
        given.refuse(
            f"{kwargs}.max_resp_len",
            f"is below data.max_response_length={most}: beyond it verl's penalty grows further, and ours is constant; use {most} or more",
        )
    return {"algorithm.reward_shaping": [{"name": "overlong_penalty", "max_length": longest, **penalty}]}


def _advantage(given: Given) -> Made:
    kind = given["algorithm.adv_estimator"]
    grpo: dict[str, Any] = {"name": "grpo", "epsilon": 1e-6, "singleton": "raw"}
    if not given["algorithm.norm_adv_by_std_in_grpo"]:
        grpo = {"name": "mean_centered", "singleton": "raw"}
    known: dict[str, dict[str, Any]] = {
        "grpo": grpo,
        "grpo_vectorized": grpo,
        "grpo_passk": {"name": "pass_at_k", "normalise": bool(given["algorithm.norm_adv_by_std_in_grpo"])},
        "rloo": {"name": "rloo", "singleton": "raw"},
        "rloo_vectorized": {"name": "rloo", "singleton": "zero"},
        "opo": {"name": "opo"},
        "gpg": {"name": "gpg"},
        "gae": {"name": "gae", "gamma": given["algorithm.gamma"], "lambda_": given["algorithm.lam"]},
        "reinforce_plus_plus": {"name": "cumulative_returns", "gamma": given["algorithm.gamma"]},
        "reinforce_plus_plus_baseline": {"name": "mean_centered", "singleton": "raw"},
    }
    made: Made = {"algorithm.advantage": given.chosen("algorithm.adv_estimator", known, why="is not supported")}
    return made | ({"algorithm.advantage_shaping": ["whiten"]} if kind in _WHITENED else {})


_WHITENED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def _loss(given: Given) -> Made:
    mode, both = given[f"{_ACTOR}.policy_loss.loss_mode"], given[f"{_ACTOR}.clip_ratio"]
    low, high = given[f"{_ACTOR}.clip_ratio_low"], given[f"{_ACTOR}.clip_ratio_high"]
    if both != 0.2 and low is not None and high is not None:
        given.note(
            f"clip_ratio={both} has no effect in verl: clip_ratio_low={low} and clip_ratio_high={high} count unless they are null."
        )
    low, high = both if low is None else low, both if high is None else high
    cap, clip = given[f"{_ACTOR}.clip_ratio_c"], {"epsilon_low": low, "epsilon_high": high}
    clamp = {"log_ratio_clamp": _CLAMP}
    taus = {"tau_positive": given[f"{_ACTOR}.tau_pos"], "tau_negative": given[f"{_ACTOR}.tau_neg"]}
    known: dict[str, dict[str, Any]] = {
        "vanilla": {"name": "ppo_clip", **clip, "dual_clip": cap, **clamp},
        "gspo": {"name": "gspo_token", **clip, "log_ratio_max": 10.0},
        "sapo": {"name": "sapo", **taus, **clamp},
        "gpg": {"name": "reinforce"},
        "cispo": {"name": "cispo", "epsilon_min": max(1 - low, 0.0), "epsilon_max": 1 + high, **clamp},
        "dro": {"name": "dro", "beta": given[f"{_ACTOR}.policy_loss.dro_beta"]},
    }
    if mode == "vanilla" and cap <= 1:
        given.refuse(f"{_ACTOR}.clip_ratio_c", "is an error in verl too; set it above 1")
    if mode == "dro" and (known["dro"]["beta"] or 0) <= 0:
        given.refuse(f"{_ACTOR}.policy_loss.dro_beta", "is an error in verl too; set it above 0")
    is_per_sequence = given[f"{_ACTOR}.loss_agg_mode"] == "seq-mean-token-mean"
    if mode == "gspo" and not is_per_sequence:
        given.note(
            "verl before 0.9.1 ignores loss_agg_mode with loss_mode=gspo, and applies seq-mean-token-mean. To repeat such a run, "
            f"import it with --set {_ACTOR}.loss_agg_mode=seq-mean-token-mean."
        )
    if mode == "sapo" and not is_per_sequence:
        given.refuse(
            f"{_ACTOR}.loss_agg_mode", "is ignored by verl's SAPO loss; use seq-mean-token-mean, which it applies"
        )
    return {"algorithm.policy_loss": given.chosen(f"{_ACTOR}.policy_loss.loss_mode", known, why="is not supported")}


def _aggregation_of(given: Given) -> Any:
    mode, scale = given[f"{_ACTOR}.loss_agg_mode"], given[f"{_ACTOR}.loss_scale_factor"]
    if mode == "seq-mean-token-sum-norm":
        if scale is None:
            given.refuse(
                f"{_ACTOR}.loss_scale_factor",
                "is not set, so verl divides by the padded width of a batch; set it, for example to data.max_response_length",
            )
        return {"name": "sequence_sum_over_length", "max_length": scale}
    known = {
        "token-mean": "token_mean",
        "token-sum": "sum",
        "seq-mean-token-sum": "sequence_sum_mean",
        "seq-mean-token-mean": "sequence_mean",
    }
    return given.chosen(f"{_ACTOR}.loss_agg_mode", known)


_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def _kl(given: Given) -> Made:
    terms: dict[str, Any] = {}
    if given[f"{_ACTOR}.use_kl_loss"] and given[f"{_ACTOR}.kl_loss_coef"]:
        kind = given[f"{_ACTOR}.kl_loss_type"]
        # `k3+` has the value of k3 and the gradient of k2, and only the gradient of a loss matters.
        estimator = "k2" if kind.endswith("+") else _ESTIMATORS.get(kind)
        if estimator not in ("k2", "k3"):
            given.refuse(
                f"{_ACTOR}.kl_loss_type",
                "is unknown, or its gradient in a loss does not pull to the reference; use low_var_kl or mse",
            )
        terms["loss"] = {"coefficient": given[f"{_ACTOR}.kl_loss_coef"], "estimator": estimator}
    if given["algorithm.use_kl_in_reward"] and given["algorithm.kl_ctrl.kl_coef"]:
        estimator = given.chosen("algorithm.kl_penalty", _ESTIMATORS)
        if given["algorithm.kl_ctrl.type"] != "fixed":
            given.refuse(
                "algorithm.kl_ctrl.type",
                "targets a KL per token, and algorithm.kl.reward.adaptive a KL per trajectory; use fixed, and write the latter by hand",
            )
        terms["reward"] = {"coefficient": given["algorithm.kl_ctrl.kl_coef"], "estimator": estimator}
    for term in terms.values():
        if term["estimator"] == "k3":
            term["log_ratio_clamp"] = _CLAMP
    return {"algorithm.kl": terms} if terms else {}


def _filters(given: Given) -> Made:
    if not given["algorithm.filter_groups.enable"]:
        return {}
    if given["algorithm.filter_groups.metric"] != "reward":
        given.refuse("algorithm.filter_groups.metric", "is another number than the reward that trains; use reward")
    # verl keeps a group of one, which `zero_variance` drops.
    return {"algorithm.filters": ["zero_variance"]} if given[f"{_ROLLOUT}.n"] > 1 else {}


def _corrections(given: Given) -> Made:
    """Corrections, and π_old: recomputed by the learner, or the rollout's in bypass mode."""
    level, threshold = given[f"{_CORRECTION}.rollout_is"], given[f"{_CORRECTION}.rollout_is_threshold"]
    is_normalised = given[f"{_CORRECTION}.rollout_is_batch_normalize"]
    loss, gate = given[f"{_CORRECTION}.loss_type"], given[f"{_CORRECTION}.rollout_rs"]
    if given[f"{_CORRECTION}.bypass_mode"]:
        if loss != "ppo_clip" or level is not None or gate is not None:
            given.note(
                "rollout_correction.loss_type, rollout_is and rollout_rs have no effect in verl with bypass_mode: the loss is that of "
                "policy_loss.loss_mode, without weights."
            )
        return {"algorithm.proximal": "rollout"}
    if (level is not None or gate is not None) and not given[f"{_ROLLOUT}.calculate_log_probs"]:
        given.note(
            "rollout_correction.rollout_is and rollout_rs have no effect in verl without rollout.calculate_log_probs. To correct, add "
            "algorithm.corrections: [tis]."
        )
        level = gate = None
    if gate is not None:
        given.refuse(
            f"{_CORRECTION}.rollout_rs",
            "removes tokens from the denominators too; leave it out, and write a correction `rejection`",
        )
    asks_for_ratios = given[f"{_ACTOR}.policy_loss.loss_mode"] != "gpg" or level or given["algorithm.use_kl_in_reward"]
    made: Made = {"algorithm.proximal": "recompute"} if asks_for_ratios else {}
    if level is None:
        return made
    if level not in ("token", "sequence"):
        given.refuse(f"{_CORRECTION}.rollout_is", "is unknown; use token or sequence")
    low, _, high = str(threshold).rpartition("_")
    try:
        bounds = {"low": float(low), "high": float(high)} if low else {"cap": float(high)}
    except ValueError:
        given.refuse(f"{_CORRECTION}.rollout_is_threshold", "is not a bound; write a number, or two such as 0.5_5.0")
        return {}
    if low and is_normalised:
        given.refuse(f"{_CORRECTION}.rollout_is_batch_normalize", "is not supported with two bounds; use one threshold")
    name = "icepop" if low else "self_normalised_tis" if is_normalised else "tis"
    return made | {"algorithm.corrections": [{"name": name, "level": level, **bounds, "log_ratio_clamp": _CLAMP}]}


_AS_THE_ACTOR = (
    *("ppo_epochs", "ppo_mini_batch_size", "loss_agg_mode", "loss_scale_factor"),
    *(f"optim.{name}" for name in _OPTIM),
)
"""Settings that verl's critic has of its own, and shares with the actor here."""


def _critic(given: Given) -> Made:
    warmup = given["trainer.critic_warmup"]
    if given["algorithm.adv_estimator"] != "gae":
        if given["critic.enable"]:
            given.refuse("critic.enable", "trains values that no advantage uses; leave it out")
        if warmup > 1:
            given.refuse(
                "trainer.critic_warmup", "makes steps in which nothing learns, as there is no critic; leave it out"
            )
        return {}
    for name in _AS_THE_ACTOR:
        actors = given[f"{_ACTOR}.{name}"]
        if given[f"critic.{name}"] not in (None, actors):
            given.refuse(
                f"critic.{name}", f"is not the actor's, {actors!r}, and both are one setting here; use the actor's"
            )
    _refuse_steps_from_1(given, "critic.optim")
    value: dict[str, Any] = {
        "loss": {"name": "value_clip", "clip_range": given["critic.cliprange_value"]},
        "coefficient": 1.0,
        "aggregation": _aggregation_of(given),
        "learning_rate": given["critic.optim.lr"],
        "warmup_steps": max(warmup - 1, 0),  # verl's first step is 1, and the actor learns from step `critic_warmup`
    }
    path = given["critic.model.path"]
    if path is None:
        given.refuse(
            "critic.model.path", f"is a DeepSeek model by verl's default; set it, such as to {given[f'{_MODEL}.path']}"
        )
    if path != given[f"{_MODEL}.path"]:
        value |= {"path": path} | ({"trust_remote_code": True} if given["critic.model.trust_remote_code"] else {})
    return {"algorithm.value": value}


def _schedule(given: Given, optim: str) -> str:
    kind = given[f"{optim}.lr_scheduler_type"]
    return given[f"{optim}.warmup_style"] or kind


def _refuse_steps_from_1(given: Given, optim: str) -> None:
    if _schedule(given, optim) == "cosine" and not given[f"{optim}.zero_indexed_step"]:
        given.refuse(
            f"{optim}.zero_indexed_step",
            "counts the cosine's steps from 1, which moves it by one step; use true, verl's default",
        )


def _optimizer(given: Given) -> Made:
    optim = f"{_ACTOR}.optim"
    kind, warmup = _schedule(given, optim), given[f"{optim}.lr_warmup_steps"]
    _refuse_steps_from_1(given, optim)
    if kind not in ("constant", "cosine"):
        given.refuse(f"{optim}.lr_scheduler_type", "is not supported; use constant or cosine")
    if warmup is None or warmup <= 0:
        share = given[f"{optim}.lr_warmup_steps_ratio"]
        warmup = math.floor(share * _length(given)) if share else 0
    norm, ignored = given[f"{optim}.clip_grad"], given[f"{_ACTOR}.grad_clip"]
    if ignored != norm:
        given.note(f"actor.grad_clip={ignored} has no effect in verl: actor.optim.clip_grad={norm} counts.")
    made: Made = {
        "optimizer.learning_rate": given[f"{optim}.lr"],
        "optimizer.betas": given[f"{optim}.betas"],
        "optimizer.weight_decay": given[f"{optim}.weight_decay"],
        "optimizer.max_grad_norm": norm,
        "optimizer.schedule": kind,
        "optimizer.warmup_steps": warmup,
    }
    if kind == "cosine":
        length, steps = _length(given), _steps(given)
        if steps < length:
            given.note(
                f"verl's cosine has {length} steps, of which its run makes {steps}. Here it falls to the same last rate in {steps} steps."
            )
        made["optimizer.min_learning_rate_share"] = last_share(
            kind, max(length - warmup, 1), steps=max(steps - warmup, 1), lowest=given[f"{optim}.min_lr_ratio"] or 0.0
        )
    return made


def _below(section: str, names: str) -> str:
    return " ".join(f"{section}.{name}" for name in names.split())


_LONG = "data.max_prompt_length data.filter_overlong_prompts data.truncation"
_PENALTY = "max_resp_len overlong_buffer_cfg.enable overlong_buffer_cfg.len overlong_buffer_cfg.penalty_factor"
_LENGTH = "trainer.total_training_steps trainer.total_epochs num_prompts data.train_batch_size"

VERL = Peer(
    title="verl",
    version="0.9.1",
    read=reading.hydra,
    defaults=_DEFAULTS,
    types=_TYPES,
    dropped=_DROPPED,
    moved=_MOVED,
    rows=(
        Row(
            of="trainer.experiment_name",
            ours="run_dir",
            make=lambda given: {"run_dir": f"runs/{given['trainer.experiment_name']}"},
        ),
        same("data.seed", "seed", "The same number draws other samples."),
        Row(
            of=_LENGTH,
            ours="num_steps",
            make=lambda given: {"num_steps": _steps(given)},
            note="A step is the same in both: one batch of prompts. `num_prompts`, the number of rows, is needed if "
            "`total_training_steps` is not set. With both, verl's run ends with the first that is reached.",
        ),
        Row(
            of=f"{_MODEL}.path {_below(f'{_ACTOR}.fsdp_config', 'dtype model_dtype')} {_COMPUTED}",
            ours="model.path model.dtype",
            make=_model,
            note="Master weights are float32 in both. `fsdp_config.dtype` has no effect in verl's FSDP.",
        ),
        same(f"{_MODEL}.trust_remote_code", "model.trust_remote_code"),
        same(f"{_MODEL}.custom_chat_template", "model.chat_template"),
        same(f"{_ROLLOUT}.max_model_len", "model.max_context"),
        Row(
            of=f"data.train_files data.prompt_key {_LONG}",
            ours="prompts",
            make=_prompts,
            note="The source `file` reads verl's Parquet files. Without the filter a long prompt is truncated at its start, with any "
            "`truncation`: the user's first message here, the templated prompt in verl.",
        ),
        Row(
            of=f"data.val_files data.prompt_key {_LONG} trainer.test_freq {_below(f'{_ROLLOUT}.val_kwargs', 'temperature n top_p top_k')} "
            f"{_below(_ROLLOUT, 'top_p top_k')}",
            ours="evaluation.prompts evaluation.every_steps evaluation.temperature evaluation.num_samples",
            make=_evaluation,
            note="verl evaluates all rows of the files; here set `evaluation.num_prompts`.",
        ),
        Row(
            of="data.max_response_length data.max_prompt_length "
            f"{_below(_ROLLOUT, 'prompt_length response_length temperature top_p top_k ignore_eos')}",
            ours=_below("sampling", "max_tokens temperature top_p top_k ignore_eos"),
            make=_sampling,
        ),
        Row(
            of=f"{_below('reward.custom_reward_function', 'path name reward_kwargs')} "
            f"{_below('custom_reward_function', 'path name reward_kwargs')}",
            ours="reward.judge",
            make=_reward,
            note="The judge `verl` calls the function unchanged, with `reward_kwargs` as its `kwargs`.",
        ),
        Row(
            of=f"reward.reward_manager.name reward_model.reward_manager {_below(_KWARGS, _PENALTY)} {_below(_LEGACY_KWARGS, _PENALTY)} "
            "data.max_response_length",
            ours="algorithm.reward_shaping",
            make=_shaping,
            note="`overlong_penalty`. verl's penalty exceeds its factor for completions longer than `max_resp_len`, so a `max_resp_len` "
            "below `data.max_response_length` is refused. "
            "Any setting of `reward_model.reward_kwargs` replaces all of `reward.reward_kwargs`.",
        ),
        Row(
            of=f"data.train_batch_size data.gen_batch_size algorithm.filter_groups.enable {_ROLLOUT}.n "
            f"{_below(_ACTOR, 'ppo_mini_batch_size ppo_epochs shuffle')}",
            ours=f"{_below('buffer', 'groups_per_step trajectories_per_group')} "
            f"{_below('learner', 'mini_batches epochs split_by')}",
            make=_batch,
            note="`ppo_mini_batch_size` counts prompts. `shuffle` is `split_by: trajectories`: both deal trajectories to mini-batches anew "
            "in every epoch, verl within each rank's share. Without it verl keeps the order, in which `balance_batch` mixes groups; here "
            "whole groups are dealt.",
        ),
        Row(
            of=f"algorithm.adv_estimator {_below('algorithm', 'norm_adv_by_std_in_grpo gamma lam')}",
            ours="algorithm.advantage algorithm.advantage_shaping",
            make=_advantage,
            note="A group of equal rewards has advantages of exactly 0 here; in verl they are rounding errors.",
        ),
        Row(
            of=f"{_below(f'{_ACTOR}.policy_loss', 'loss_mode dro_beta')} "
            f"{_below(_ACTOR, 'clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c tau_pos tau_neg loss_agg_mode')}",
            ours="algorithm.policy_loss",
            make=_loss,
            note="`vanilla` is `ppo_clip` with `dual_clip`. `clip_ratio` alone has no effect in verl: the two-sided settings count "
            "unless they are null.",
        ),
        Row(
            of=_below(_ACTOR, "loss_agg_mode loss_scale_factor"),
            ours="algorithm.aggregation",
            make=lambda given: {"algorithm.aggregation": _aggregation_of(given)},
            note="`token-mean`: `token_mean`; `token-sum`: `sum`; `seq-mean-token-sum`: `sequence_sum_mean`; `seq-mean-token-mean`: "
            "`sequence_mean`; `seq-mean-token-sum-norm`: `sequence_sum_over_length`.",
        ),
        Row(
            of=f"{_below(_ACTOR, 'use_kl_loss kl_loss_coef kl_loss_type')} "
            f"{_below('algorithm', 'use_kl_in_reward kl_penalty kl_ctrl.type kl_ctrl.kl_coef')}",
            ours="algorithm.kl",
            make=_kl,
            note="`kl.loss` and `kl.reward`. `low_var_kl` is k3, whose value verl also clamps to ±10. `k1` in a loss has a gradient of "
            "mean 0, and is refused.",
        ),
        same(
            f"{_ACTOR}.entropy_coeff",
            "algorithm.entropy_coefficient",
            "Both aggregate entropies as they do the policy loss.",
        ),
        Row(
            of=f"{_below('algorithm.filter_groups', 'enable metric')} {_ROLLOUT}.n",
            ours="algorithm.filters",
            make=_filters,
            note="`zero_variance`: more groups are sampled until the step is full. Without effect on groups of one.",
        ),
        Row(
            of=_below(
                _CORRECTION,
                "bypass_mode loss_type rollout_is rollout_is_threshold rollout_is_batch_normalize rollout_rs",
            )
            + f" {_ROLLOUT}.calculate_log_probs {_ACTOR}.policy_loss.loss_mode algorithm.use_kl_in_reward",
            ours="algorithm.proximal algorithm.corrections",
            make=_corrections,
            note="verl recomputes π_old (`proximal: recompute`) except in bypass mode. The default here is the rollout's.",
        ),
        Row(
            of=f"algorithm.adv_estimator trainer.critic_warmup {_MODEL}.path "
            f"{_below('critic', 'enable model.path model.trust_remote_code cliprange_value optim.lr optim.zero_indexed_step')} "
            f"{_below('critic', ' '.join(_AS_THE_ACTOR))} {_below(_ACTOR, ' '.join(_AS_THE_ACTOR))}",
            ours="algorithm.value",
            make=_critic,
            note="The critic has its own backbone, learning rate and clip range. It shares all other settings with the actor: they must be "
            "equal if set. The actor learns from step `critic_warmup`, counted from 1: after `critic_warmup` − 1 steps. Its rate decays "
            "over all steps here; in verl its decay lags by these steps.",
        ),
        Row(
            of=f"{_below(f'{_ACTOR}.optim', 'lr betas weight_decay lr_scheduler_type warmup_style min_lr_ratio')} {_ACTOR}.grad_clip "
            f"{_below(f'{_ACTOR}.optim', 'clip_grad lr_warmup_steps lr_warmup_steps_ratio zero_indexed_step')} {_LENGTH}",
            ours=_below(
                "optimizer",
                "learning_rate betas weight_decay max_grad_norm schedule warmup_steps min_learning_rate_share",
            ),
            make=_optimizer,
            note="verl clips by `optim.clip_grad`; `actor.grad_clip` has no effect. Its weight decay applies to norms and biases too, "
            "which have none here. Its warm-up begins at 0; here the first step has 1/warmup_steps of the rate. Both cosines end at the "
            "rate of verl's last step. Between, they differ by a step at most, and by more if `total_epochs` ends verl's run before "
            "`total_training_steps`.",
        ),
        Row(of=_below(_MODEL, "lora_rank lora_alpha target_modules"), ours="learner.lora", make=_lora),
        same(f"{_MODEL}.enable_gradient_checkpointing", "learner.activation_checkpointing"),
        Row(
            of=f"{_ACTOR}.ulysses_sequence_parallel_size {_ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
            ours="learner.sequence_parallel_size learner.num_ranks",
            make=_sequence_parallel,
            note="A value above 1 outside `fsdp_config` takes precedence. It applies to the critic too here, and not to the reference.",
        ),
        only(
            "write it into the model's folder, or leave it out",
            f"{_MODEL}.override_config data.apply_chat_template_kwargs {_below(_MODEL, 'hf_config_path tokenizer_path')} "
            "data.tokenizer",
            also={f"{_MODEL}.override_config": None, "data.apply_chat_template_kwargs": None},
        ),
        only(
            "its settings are in another file; add --cfg job --resolve to the command, and import the configuration that it prints",
            "--config-name --config-path",
            also={"--config-name": "ppo_trainer.yaml"},
        ),
        only("the table is that of FSDP; use dp", "model_engine"),
        only(
            "another program has other defaults, and may learn otherwise; use the command of verl.trainer.main_ppo",
            "-m",
        ),
        only("write only its param_dtype", _MIXED_PRECISION, also={_MIXED_PRECISION: {}}),
        only("write the adapter as model.lora_rank, lora_alpha and target_modules", f"{_MODEL}.lora.rank"),
        only("trained weights are not quantized; leave it out", _below(_ACTOR, "qat.enable fsdp_config.qat.enable")),
        only(
            "leave it out: routing is replayed by rollout.routing_replay, which is not imported, and MTP layers do not train",
            f"{_ROLLOUT}.enable_rollout_routing_replay {_ACTOR}.router_replay.mode {_MODEL}.mtp.enable_train",
        ),
        only(
            "a new adapter starts, on the modules of target_modules; leave it out",
            f"{_below(_MODEL, 'exclude_modules lora_adapter_path')} critic.model.lora_rank",
        ),
        only(
            "shorten the file itself",
            "data.train_max_samples data.val_max_samples",
            also={"data.train_max_samples": None, "data.val_max_samples": None},
        ),
        only(
            "the seed decides the order of prompts, each once an epoch; leave it out",
            "data.shuffle data.custom_cls.path trainer.v1.sampler.custom_sampler.path",
        ),
        only("use `treadwheel eval`", "trainer.val_only"),
        only(
            "verl's old trainer filters no groups, and has other losses in bypass mode; leave it out", "trainer.use_v1"
        ),
        only("use sync, and buffer.max_off_policy_steps for asynchronous runs", "trainer.v1.trainer_mode"),
        only("leave it out", _below(_ROLLOUT, "do_sample over_sample_rate")),
        only(
            "leave it out, and set rollout.quantization=fp8_per_block, which is verl's FP8 scheme",
            f"{_ROLLOUT}.quantization",
        ),
        only(
            "write turns and tools as an environment (docs/environments.md); a column agent_name is not read",
            f"{_below(f'{_ROLLOUT}.multi_turn', 'enable tool_config_path function_tool_path')} "
            f"{_below(f'{_ROLLOUT}.agent', 'default_agent_loop agent_loop_config_path agent_loop_manager_class')}",
        ),
        only(
            "the optimizer is AdamW; leave it out",
            _below(f"{_ACTOR}.optim", "optimizer optimizer_impl override_optimizer_config num_cycles"),
        ),
        only("rows have no weights by their reward; leave it out", "algorithm.use_pf_ppo"),
        only(
            "name the model in reward.models, and use the judge reward_model",
            "reward.reward_model.enable reward_model.enable",
            also={"reward_model.enable": False},
        ),
        only(
            "write your reward manager as a judge (docs/rewards.md)",
            "reward.reward_manager.source reward_model.reward_loop_source",
            also={"reward_model.reward_loop_source": "register"},
        ),
        only("use the judge code_sandbox_fusion", "reward.sandbox_fusion.url sandbox_fusion.url"),
        only("use preset on_policy_distillation", "distillation.enabled"),
    ),
)

"""The table of TRL's GRPO: GRPOConfig, and the script and model arguments of `trl grpo`."""

import math
from typing import Any

from deploy.importing import reading
from deploy.importing.table import NO_NUMBER, NUMBER, Given, Made, Peer, Row, last_share, only, same

_DEFAULTS: dict[str, Any] = {
    "model_name_or_path": None, "model_revision": "main", "trust_remote_code": False, "model_init_kwargs": None,
    "dtype": "float32", "bf16": None, "fp16": False, "vllm_max_model_length": None,
    "use_peft": False, "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": None,
    "lora_target_parameters": None, "lora_modules_to_save": None, "use_rslora": False, "use_dora": False,
    "load_in_8bit": False, "load_in_4bit": False, "disable_dropout": False,
    "dataset_name": None, "dataset_config": None, "dataset_train_split": "train", "dataset_streaming": False,
    "streaming": False, "datasets": None, "shuffle_dataset": True, "chat_template_kwargs": None,
    "reward_funcs": None, "reward_weights": None, "reward_model_name_or_path": None,
    "multi_objective_aggregation": "sum_then_normalize", "scale_rewards": "group",
    "num_processes": None, "num_prompts": None, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
    "generation_batch_size": None, "steps_per_generation": None, "num_generations": 8, "num_iterations": 1,
    "max_steps": -1, "num_train_epochs": 3.0,
    "max_completion_length": 512, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0,
    "generation_kwargs": None, "vllm_structured_outputs_regex": None, "max_tool_calling_iterations": None,
    "loss_type": "dapo", "importance_sampling_level": "token", "epsilon": 0.2, "epsilon_high": None, "delta": None,
    "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
    "beta": 0.0, "use_bias_correction_kl": True, "sync_ref_model": False,
    "entropy_coef": 0.0, "use_adaptive_entropy": False, "top_entropy_quantile": 1.0,
    "mask_truncated_completions": False, "off_policy_mask_threshold": None,
    "use_vllm": False, "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0, "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_cap": None,
    "router_aux_loss_coef": None, "label_smoothing_factor": 0.0, "neftune_noise_alpha": None,
    "learning_rate": 1e-6, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0,
    "max_grad_norm": 1.0, "optim": "adamw_torch_fused", "optim_args": None,
    "lr_scheduler_type": "linear", "lr_scheduler_kwargs": None, "warmup_steps": 0,
    "gradient_checkpointing": True, "seed": 42, "data_seed": None, "output_dir": None,
}  # fmt: skip

_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(
        ("generation_batch_size", "steps_per_generation", "num_prompts", "max_grad_norm", "epsilon_high", "delta", "min_p",
         "off_policy_mask_threshold", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
         "vllm_importance_sampling_cap"), NO_NUMBER,
    ),
    "lr_scheduler_kwargs": (dict, type(None)),
    "scale_rewards": (str, bool), "reward_weights": (list, type(None)), "dtype": (str, type(None)),
}  # fmt: skip

_DROPPED = {
    "resources have settings of their own in `learner`, `rollout` and `elastic`": (
        "accelerator_config accelerate_config parallelism_config fsdp* deepspeed ddp_* use_cpu local_rank "
        "ds3_gather_for_generation vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_server_* "
        "vllm_group_port vllm_gpu_memory_utilization vllm_tensor_parallel_size use_transformers_* "
        "transformers_continuous_batching_config cache_implementation use_cache"
    ),
    "kernels and memory: the same numbers up to rounding": (
        "attn_implementation tf32 torch_compile* use_liger_kernel liger_kernel_config pad_to_multiple_of "
        "gradient_checkpointing_kwargs torch_empty_cache_steps cast_lm_head_to_fp32 dataloader_* "
        "average_tokens_across_devices auto_find_batch_size full_determinism bnb_4bit_* "
        "use_bnb_nested_quant use_bnb_*"
    ),
    "logging: everything is recorded, and written to `metrics.sinks`": (
        "log* report_to run_name project trackio_* num_completions_to_print disable_tqdm debug "
        "include_num_input_tokens_seen skip_memory_metrics include_for_metrics"
    ),
    "evaluation has settings of its own in `evaluation`": (
        "eval_* per_device_eval_batch_size prediction_loss_only num_generations_eval dataset_test_split test_split_size "
        "do_eval do_predict batch_eval_metrics bf16_full_eval fp16_full_eval load_best_model_at_end "
        "metric_for_best_model greater_is_better"
    ),
    "checkpoints have settings of their own in `checkpoint`": (
        "save_* enable_jit_checkpoint push_to_hub* hub_* resume_from_checkpoint ignore_data_skip "
        "restore_callback_states_from_checkpoint"
    ),
    "set environment variables where the run starts": "env",
    "without effect on GRPO, or on text alone": (
        "remove_unused_columns label_names train_sampling_strategy length_column_name do_train "
        "optim_target_modules lora_task_type ignore_bias_buffers"
    ),
    "details of a feature that another setting turns on": (
        "ref_model_mixup_alpha ref_model_sync_steps entropy_coef_min entropy_coef_max entropy_coef_delta "
        "entropy_target vespo_*"
    ),
}

_MOVED = {
    "warmup_ratio": "write it as warmup_steps, which below 1 is a share of all steps",
    "torch_dtype": "write it as dtype",
    "vllm_guided_decoding_regex": "write it as vllm_structured_outputs_regex",
    "max_prompt_length": "remove it, and write prompts.max_prompt_tokens, with on_long_prompt: truncate_start, into the run file",
    "chat_template": "remove it, and write it as model.chat_template into the run file",
    "system_prompt": "remove it, and write it as prompts.system_prompt into the run file",
    "dataset_prompt_column": "remove it, and write it as prompts.column into the run file",
}


def _model(given: Given) -> Made:
    path, revision = given["model_name_or_path"], given["model_revision"]
    if path is None:
        given.refuse("model_name_or_path", "names no model; add --set model_name_or_path=ORG/MODEL")
    return {"model.path": path} | ({} if revision == "main" else {"model.revision": revision})


def _dtype(given: Given) -> Made:
    dtype, is_weights_type = given["dtype"], given["bf16"] is False
    if given["fp16"]:
        given.refuse("fp16", "is not supported as compute type; use bf16: true")
    if is_weights_type and dtype not in ("float32", "bfloat16"):
        given.refuse("dtype", "is TRL's compute type if bf16 is false; use float32 or bfloat16")
    if dtype not in ("float32", "auto", None):
        given.note(f"dtype={dtype}: TRL trains weights of this type. Here master weights are float32.")
    return {"model.dtype": "float32" if is_weights_type and dtype == "float32" else "bfloat16"}


def _lora(given: Given) -> Made:
    drops = not given["disable_dropout"]
    if not given["use_peft"]:
        return {}
    if drops and (dropout := given["lora_dropout"]):
        given.note(
            f"lora_dropout={dropout}: TRL learns with dropout in the adapters. Here they have none: the learning policy is the sampling "
            "policy."
        )
    lora = {"rank": given["lora_r"], "alpha": given["lora_alpha"]}
    modules = given["lora_target_modules"]
    if modules is None:
        given.refuse(
            "lora_target_modules", "is not set, and PEFT's choice depends on the model; write it, such as all-linear"
        )
    # TRL's command line makes a list of one, and TRL takes its entry.
    return {"learner.lora": lora | {"target_modules": "all-linear" if modules == ["all-linear"] else modules}}


def _prompts(given: Given) -> Made:
    path = given["dataset_name"]
    if path is None:
        given.refuse("dataset_name", "names no data; add --set dataset_name=ORG/DATA")
    given.note("A data set of the hub also needs its commit: prompts.revision.")
    config = given["dataset_config"]
    prompts = {"name": "dataset", "path": path, "split": given["dataset_train_split"]}
    # TRL tokenizes a text unchanged, and applies the chat template to messages.
    prompts |= {"column": "prompt", "text_as": "text"}
    return {"prompts": prompts | ({} if config is None else {"config": config})}


def _judge(given: Given, name: str) -> dict[str, Any]:
    """`my_rewards.kind` is the function `kind` of the module `my_rewards`. A name without a dot is TRL's own function."""
    module, _, function = name.rpartition(".")
    if name == "get_soft_overlong_punishment":
        given.refuse(
            "reward_funcs",
            f"contains {name}, which is a reward shaping here; leave it out, and write algorithm.reward_shaping: "
            "[{name: overlong_penalty, max_length: 1280, cache: 256}]",
        )
    if not module:
        given.note(
            f"The reward {name} is TRL's own: install trl where judges run, or use a judge of `treadwheel list rewards`."
        )
        return {"name": "trl", "function": f"trl.rewards:{function}", "conversational": True}
    given.note("A reward function gets texts. If it expects messages, set conversational: true for its judge.")
    return {"name": "trl", "function": f"{module}:{function}"}


def _reward(given: Given) -> Made:
    names, weights = given["reward_funcs"], given["reward_weights"]
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        given.refuse("reward_funcs", "names no reward; add --set reward_funcs=[my_rewards.my_function]")
        return {}
    weights = [1.0] * len(names) if weights is None else weights
    if len(weights) != len(names):
        given.refuse("reward_weights", f"does not have {len(names)} entries, as reward_funcs does; give one for each")
        return {}
    needs_parts = given["multi_objective_aggregation"] == "normalize_then_sum"
    if len(names) == 1 and weights[0] == 1 and not needs_parts:
        return {"reward.judge": _judge(given, names[0])}
    parts = {
        name.rpartition(".")[2]: {"judge": _judge(given, name), "weight": weight}
        for name, weight in zip(names, weights, strict=True)
    }
    if len(parts) < len(names):
        given.refuse("reward_funcs", "has two functions of one name, which would be one part here; rename one")
    return {"reward.parts": parts}


def _advantage(given: Given) -> Made:
    scale, way = given["scale_rewards"], given["multi_objective_aggregation"]
    switches: dict[Any, str] = {True: "group", False: "none", "True": "group", "False": "none"}
    scale = switches.get(scale, scale)
    if way == "normalize_then_sum":
        return {"algorithm.advantage": {"name": "gdpo", "epsilon": 1e-4}}
    known: dict[str, Any] = {
        "group": {"name": "grpo", "epsilon": 1e-4},
        "batch": {"name": "group_mean_batch_std", "epsilon": 1e-4},
        "none": {"name": "mean_centered"},
    }
    if way != "sum_then_normalize":
        given.refuse("multi_objective_aggregation", "is unknown; use sum_then_normalize or normalize_then_sum")
    if scale not in known:
        given.refuse("scale_rewards", f"is unknown; use one of {', '.join(known)}")
    return {"algorithm.advantage": known.get(str(scale))}


def _updates(given: Given) -> tuple[int, int, int]:
    """Completions of a generation, optimizer updates in an epoch over them, and epochs."""
    processes = given["num_processes"]
    if processes is None:
        given.refuse("num_processes", "is not in TRL's file, and decides the batch; add --set num_processes=8")
        processes = 1
    else:
        (processes,) = given.counts("num_processes")
    per_device, accumulation, epochs = given.counts(
        "per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations"
    )
    size, steps = given["generation_batch_size"], given["steps_per_generation"]
    # GRPOConfig sets both, for the number of processes that it runs in.
    if size is not None and steps is not None and size != steps * per_device * processes:
        given.refuse(
            "steps_per_generation",
            f"and generation_batch_size={size} do not agree for num_processes={processes}; unset one: --set generation_batch_size=null",
        )
    if size is not None:
        steps = size / (per_device * processes)
    steps = accumulation if steps is None else steps
    if steps % accumulation:
        given.refuse(
            "gradient_accumulation_steps",
            f"does not divide the {steps:g} steps of a generation, so that an update spans two of them; use a divisor",
        )
    return int(per_device * processes * steps), max(int(steps // accumulation), 1), epochs


def _batch(given: Given) -> Made:
    completions, mini_batches, epochs = _updates(given)
    (size,) = given.counts("num_generations")
    if completions % size:
        given.refuse("num_generations", f"does not divide the {completions} completions of a generation; use a divisor")
    made: Made = {"buffer.groups_per_step": completions // size, "buffer.trajectories_per_group": size}
    made |= {"learner.epochs": epochs, "learner.mini_batches": mini_batches}
    return made | ({"learner.split_by": "trajectories"} if mini_batches > 1 else {})


def _steps(given: Given) -> int:
    completions, mini_batches, iterations = _updates(given)
    updates, prompts, a_generation = given["max_steps"], given["num_prompts"], mini_batches * iterations
    if updates <= 0 and prompts is None:
        given.refuse(
            "max_steps",
            "is not set, so the data decides the length; set it, or give the number of rows: --set num_prompts=7473",
        )
    elif updates <= 0:
        (size,) = given.counts("num_generations")
        generations = given.counts("num_prompts")[0] * size // max(completions, 1)
        updates = math.ceil(given["num_train_epochs"] * generations * a_generation)
    steps = max(int(updates) // a_generation, 1)
    if steps * a_generation != updates:
        given.note(
            f"TRL makes {updates} updates, and each step here all {a_generation} of a generation: {steps * a_generation} in {steps} "
            f"step{'s' if steps > 1 else ''}."
        )
    return steps


def _loss(given: Given) -> Made:
    kind, level = given["loss_type"], given["importance_sampling_level"]
    low, high = given["epsilon"], given["epsilon_high"]
    high = low if high is None else high
    bounds = {"epsilon_low": low, "epsilon_high": high}
    if given["delta"] is not None:
        bounds["delta"] = given["delta"]
    if kind == "vespo":
        given.refuse(
            "loss_type",
            "computes its weights from ratios that TRL's correction has bounded; write policy_loss: vespo by hand",
        )
    elif kind not in _AGGREGATIONS:
        given.refuse("loss_type", f"is unknown; use one of {', '.join(_AGGREGATIONS)}")
    if level not in ("token", "sequence") or (level == "sequence" and kind in ("cispo", "sapo")):
        given.refuse("importance_sampling_level", f"is not supported with loss_type={kind}; use token")
    if kind == "cispo":
        return {"algorithm.policy_loss": {"name": "cispo", "epsilon_max": high}}
    if kind == "sapo":
        taus = {"tau_positive": given["sapo_temperature_pos"], "tau_negative": given["sapo_temperature_neg"]}
        return {"algorithm.policy_loss": {"name": "sapo", **taus}}
    return {"algorithm.policy_loss": {"name": "gspo" if level == "sequence" else "ppo_clip", **bounds}}


_AGGREGATIONS = {
    "grpo": "sequence_mean",
    "sapo": "sequence_mean",
    "dr_grpo": "sequence_sum_over_length",
    "luspo": "sequence_sum_mean",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "bnpo": "token_mean",
    "vespo": "token_mean",
}


def _aggregation(given: Given) -> Made:
    kind = given["loss_type"]
    if kind == "bnpo":
        given.refuse(
            "loss_type", "divides by the tokens of one device's micro-batch; use dapo, which counts all tokens"
        )
    _, mini_batches, _ = _updates(given)
    if mini_batches > 1 and _AGGREGATIONS.get(kind) == "token_mean":
        given.note(
            "With several updates a generation, TRL divides each update by their mean token count. Here each update is divided by its "
            "own token count."
        )
    return {"algorithm.aggregation": _AGGREGATIONS.get(kind)}


def _kl(given: Given) -> Made:
    beta, is_corrected = given["beta"], given["use_bias_correction_kl"]
    if not beta:
        return {}
    if is_corrected and given["importance_sampling_level"] == "sequence":
        given.refuse(
            "use_bias_correction_kl",
            "with importance_sampling_level=sequence weighs the KL by the ratio of the sequence; set it to false",
        )
    if is_corrected:
        given.note("TRL weighs its corrected KL by π/π_old. Here it is π/μ: the same if engine and learner agree.")
    return {"algorithm.kl": {"loss": {"coefficient": beta, "estimator": "unbiased" if is_corrected else "k3"}}}


def _entropy(given: Given) -> Made:
    coefficient, kind = given["entropy_coef"], given["loss_type"]
    if not coefficient:
        return {}
    if _AGGREGATIONS.get(kind) != "token_mean":
        given.refuse(
            "entropy_coef",
            f"multiplies a mean over tokens in TRL, and here the aggregation of loss_type={kind}; use dapo",
        )
    if given["top_entropy_quantile"] < 1:
        given.refuse("entropy_coef", "with top_entropy_quantile acts on some tokens in TRL, on all here; set only one")
    given.note(
        "TRL's entropy bonus is a mean over the tokens of each micro-batch. Here it is over those of an update: the same for equal lengths."
    )
    return {"algorithm.entropy_coefficient": coefficient}


def _filters(given: Given) -> Made:
    masks, share, kind = given["mask_truncated_completions"], given["top_entropy_quantile"], given["loss_type"]
    if masks and _AGGREGATIONS.get(kind) != "token_mean":
        given.refuse(
            "mask_truncated_completions",
            f"keeps truncated completions in the denominator of loss_type={kind}, and a filter here removes them; use dapo",
        )
    if share <= 0:
        given.refuse("top_entropy_quantile", "keeps one token in TRL and none here; use a share above 0")
    filters: list[Any] = ["overlong_mask"] if masks else []
    filters += [{"name": "high_entropy_tokens", "share": share}] if share < 1 else []
    return {"algorithm.filters": filters} if filters else {}


def _corrections(given: Given) -> Made:
    """Corrections, and π_old, which TRL's learner computes."""
    corrections: list[dict[str, Any]] = []
    if given["use_vllm"] and given["vllm_importance_sampling_correction"]:
        level, _, kind = given["vllm_importance_sampling_mode"].partition("_")
        low, high = given["vllm_importance_sampling_clip_min"], given["vllm_importance_sampling_clip_max"]
        high = given["vllm_importance_sampling_cap"] or high
        if level not in ("token", "sequence") or kind not in ("truncate", "mask"):
            given.refuse("vllm_importance_sampling_mode", "is unknown; use token_truncate or another of TRL's four")
        if high is None:
            given.refuse(
                "vllm_importance_sampling_clip_max", "is no bound, and a correction here needs one; set a number"
            )
        names = ("tis", "floor", "cap") if kind == "truncate" else ("icepop", "low", "high")
        corrections.append({"name": names[0], "level": level, names[1]: low or 0.0, names[2]: high})
    elif not given["use_vllm"]:
        given.note(
            "TRL samples with the learning model. Here an engine samples: if its rounding differs (mismatch/*), add "
            "algorithm.corrections: [tis]."
        )
    if given["off_policy_mask_threshold"] is not None:
        corrections.append({"name": "opsm", "delta": given["off_policy_mask_threshold"]})
    made: Made = {"algorithm.proximal": "recompute"}
    return made | ({"algorithm.corrections": corrections} if corrections else {})


def _router(given: Given) -> Made:
    ours = "algorithm.router_aux_loss_coefficient, with rollout.routing_replay"
    if given["router_aux_loss_coef"] is None:
        given.note(
            f"On a mixture of experts TRL adds the router's loss, with the model's own coefficient. Here set {ours}."
        )
    elif given["router_aux_loss_coef"] != 0:
        given.refuse("router_aux_loss_coef", f"is not imported; set it to 0, and write {ours}")
    return {}


def _sampling(given: Given) -> Made:
    top_p, top_k, min_p = given["top_p"], given["top_k"], given["min_p"]
    if top_p < 1 or top_k > 0 or min_p:
        given.note(
            "top_p, top_k, min_p: TRL's learner ignores them in its log-probs. Here learner and engine both apply them."
        )
    made: Made = {"sampling.max_tokens": given["max_completion_length"], "sampling.temperature": given["temperature"]}
    made |= {"sampling.top_p": top_p, "sampling.top_k": max(top_k, 0)}
    return made | ({"sampling.min_p": min_p} if min_p else {})


def _schedule(given: Given) -> Made:
    kind, warmup = given["lr_scheduler_type"], given["warmup_steps"]
    known = {"linear": "linear", "cosine": "cosine", "constant": "constant"}
    known |= {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}
    schedule = given.chosen("lr_scheduler_type", known, why="is not supported")
    made: Made = {"optimizer.schedule": schedule}
    lowest, (_, mini_batches, iterations) = _lowest_share(given), _updates(given)
    length, steps = _steps(given), 0
    if kind != "constant" and warmup:
        steps = math.ceil(warmup * length if warmup < 1 else warmup / (mini_batches * iterations))
        made["optimizer.warmup_steps"] = steps
    if schedule in ("linear", "cosine"):
        made["optimizer.min_learning_rate_share"] = last_share(schedule, max(length - steps, 1), lowest=lowest)
    return made


def _lowest_share(given: Given) -> float:
    """The share of the peak rate to which the schedule decays."""
    settings: dict[str, Any] = given["lr_scheduler_kwargs"] or {}
    if given["lr_scheduler_type"] != "cosine_with_min_lr":
        if settings:
            given.refuse("lr_scheduler_kwargs", "is not supported with this lr_scheduler_type; leave it out")
        return 0.0
    share: Any = settings.get("min_lr_rate")
    if len(settings) != 1 or type(share) not in NUMBER or not 0 <= share <= 1:
        given.refuse("lr_scheduler_kwargs", "is not supported; write only min_lr_rate, a share of learning_rate")
        return 0.0
    return share


def _optimizer(given: Given) -> Made:
    norm = given["max_grad_norm"]
    return {
        "optimizer.learning_rate": given["learning_rate"],
        "optimizer.betas": [given["adam_beta1"], given["adam_beta2"]],
        "optimizer.epsilon": given["adam_epsilon"],
        "optimizer.weight_decay": given["weight_decay"],
        "optimizer.max_grad_norm": norm or None,
    }


_BATCH = (
    "num_processes per_device_train_batch_size gradient_accumulation_steps generation_batch_size steps_per_generation "
    "num_iterations"
)
_LENGTH = f"{_BATCH} num_generations max_steps num_train_epochs num_prompts"

TRL = Peer(
    title="TRL",
    version="1.16.0",
    read=reading.flat,
    defaults=_DEFAULTS,
    types=_TYPES,
    dropped=_DROPPED,
    moved=_MOVED,
    rows=(
        same("output_dir", "run_dir"),
        same("seed", "seed", "The same number draws other samples."),
        Row(
            of=_LENGTH,
            ours="num_steps",
            make=lambda given: {"num_steps": _steps(given)},
            note="A step of TRL is one optimizer update; a step here is all updates on one generation. `num_prompts`, the number of "
            "rows, is needed if `max_steps` is not set.",
        ),
        Row(of="model_name_or_path model_revision", ours="model.path model.revision", make=_model),
        same("trust_remote_code", "model.trust_remote_code"),
        Row(
            of="bf16 fp16 dtype",
            ours="model.dtype",
            make=_dtype,
            note="The compute type: bfloat16, or with `bf16: false` the type of the weights, `dtype`. Master weights here are float32.",
        ),
        same("vllm_max_model_length", "model.max_context", "Only with `use_vllm`.", needs="use_vllm"),
        Row(
            of="dataset_name dataset_config dataset_train_split",
            ours="prompts",
            make=_prompts,
            note="The source `dataset` with the column `prompt`: a text is sent unchanged, messages go through the chat template. It "
            "needs a commit of the hub.",
        ),
        Row(
            of="max_completion_length temperature top_p top_k min_p",
            ours="sampling.max_tokens sampling.temperature sampling.top_p sampling.top_k sampling.min_p",
            make=_sampling,
            note="TRL's learner applies the temperature and ignores top_p, top_k and min_p; here it applies all four.",
        ),
        same("repetition_penalty", "sampling.repetition_penalty", "*Biased* in both systems."),
        same("vllm_structured_outputs_regex", "sampling.regex", "Only with `use_vllm`.", needs="use_vllm"),
        Row(
            of="reward_funcs reward_weights multi_objective_aggregation",
            ours="reward.judge reward.parts",
            make=_reward,
            note="The judge `trl` calls the function unchanged.",
        ),
        Row(
            of=f"{_BATCH} num_generations",
            ours="buffer.groups_per_step buffer.trajectories_per_group learner.epochs learner.mini_batches learner.split_by",
            make=_batch,
            note="Groups are per_device_train_batch_size · num_processes · steps_per_generation / num_generations; mini-batches are "
            "steps_per_generation / gradient_accumulation_steps. `num_processes` is a setting of accelerate, and must be given. TRL deals "
            "completions to mini-batches once a generation; here they are dealt anew in every epoch.",
        ),
        Row(
            of="scale_rewards multi_objective_aggregation",
            ours="algorithm.advantage",
            make=_advantage,
            note="ε is 1e-4 in TRL. A group of equal rewards has advantages of exactly 0 here.",
        ),
        Row(
            of="loss_type importance_sampling_level epsilon epsilon_high delta sapo_temperature_pos sapo_temperature_neg",
            ours="algorithm.policy_loss",
            make=_loss,
            note="The level `sequence` is `gspo`. CISPO's `epsilon_high` is the bound itself, not 1 + `epsilon_high`.",
        ),
        Row(
            of=f"loss_type {_BATCH}",
            ours="algorithm.aggregation",
            make=_aggregation,
            note="`grpo` and `sapo`: `sequence_mean`; `dapo` and `cispo`: `token_mean`; `dr_grpo`: `sequence_sum_over_length`; "
            "`luspo`: `sequence_sum_mean`. `bnpo` and `vespo` are refused.",
        ),
        Row(
            of="beta use_bias_correction_kl importance_sampling_level",
            ours="algorithm.kl",
            make=_kl,
            note="`kl.loss` with the estimator `unbiased` (weighed by π/π_old in TRL, by π/μ here), or `k3` without the bias correction.",
        ),
        Row(
            of="entropy_coef loss_type top_entropy_quantile",
            ours="algorithm.entropy_coefficient",
            make=_entropy,
            note="Only with `token_mean`, which makes both a mean over tokens: of a micro-batch in TRL, of an update here.",
        ),
        Row(
            of="mask_truncated_completions top_entropy_quantile loss_type",
            ours="algorithm.filters",
            make=_filters,
            note="`overlong_mask`, only with `token_mean`; `high_entropy_tokens`, whose quantile is over the step here and over a "
            "micro-batch in TRL.",
        ),
        Row(
            of="use_vllm vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max "
            "vllm_importance_sampling_clip_min vllm_importance_sampling_cap off_policy_mask_threshold",
            ours="algorithm.proximal algorithm.corrections",
            make=_corrections,
            note="`truncate` is `tis`, `mask` is `icepop`, `off_policy_mask_threshold` is `opsm`. TRL's learner computes π_old: "
            "`proximal: recompute`.",
        ),
        Row(
            of="learning_rate adam_beta1 adam_beta2 adam_epsilon weight_decay max_grad_norm",
            ours="optimizer.learning_rate optimizer.betas optimizer.epsilon optimizer.weight_decay optimizer.max_grad_norm",
            make=_optimizer,
        ),
        Row(
            of=f"lr_scheduler_type lr_scheduler_kwargs warmup_steps {_LENGTH}",
            ours="optimizer.schedule optimizer.min_learning_rate_share optimizer.warmup_steps",
            make=_schedule,
            note="TRL's rate changes with every update, ours with every step. TRL's warm-up begins at 0; here the first step has "
            "1/warmup_steps of the rate. Both end at the rate of TRL's last step. Between, a cosine differs by a step at most. "
            "`cosine_with_min_lr` needs `min_lr_rate` in `lr_scheduler_kwargs`.",
        ),
        Row(
            of="use_peft lora_r lora_alpha lora_dropout disable_dropout lora_target_modules",
            ours="learner.lora",
            make=_lora,
            note="Adapters have no dropout here. TRL's have, unless `disable_dropout` is set.",
        ),
        same("gradient_checkpointing", "learner.activation_checkpointing"),
        only(
            "write it into the model's folder, or leave it out",
            "model_init_kwargs chat_template_kwargs",
            also={"model_init_kwargs": {}, "chat_template_kwargs": {}},
        ),
        only("use the sampling settings themselves", "generation_kwargs", also={"generation_kwargs": {}}),
        only("use one data set, or prompts.sources", "dataset_streaming streaming datasets", also={"datasets": []}),
        only("the seed decides the order of prompts; leave it out", "shuffle_dataset data_seed"),
        only("name the model in reward.models, and use the judge reward_model", "reward_model_name_or_path"),
        only("write an agent as an environment (docs/environments.md)", "max_tool_calling_iterations"),
        only("the reference model is fixed; leave it out", "sync_ref_model"),
        only("the coefficient is fixed; use entropy_coef", "use_adaptive_entropy"),
        Row(
            of="router_aux_loss_coef",
            ours="",
            make=_router,
            note="On a mixture of experts write algorithm.router_aux_loss_coefficient, with rollout.routing_replay.",
        ),
        only("the loss has no such term; leave it out", "label_smoothing_factor neftune_noise_alpha"),
        only(
            "the optimizer is AdamW; leave it out", "optim optim_args", also={"optim": "adamw_torch", "optim_args": ""}
        ),
        only(
            "adapters are plain LoRA, on weights that are not quantized; leave it out",
            "use_rslora use_dora load_in_8bit load_in_4bit",
        ),
        only("name modules in lora_target_modules", "lora_target_parameters lora_modules_to_save"),
    ),
)

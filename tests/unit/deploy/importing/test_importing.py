"""Configurations of other systems as run files: numbers worked out by hand, and no setting lost on the way."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from deploy.cli import app
from deploy.config.loading import validated
from deploy.config.yaml_text import parse
from deploy.importing import PEERS, run_file, verl
from deploy.importing.reading import flat, hydra
from deploy.importing.script import Unresolved
from deploy.importing.table import Given
from learner.algorithms.objective import Objective

CONFIGS = Path(__file__).with_name("configs")
MORE = {"verl_gsm8k.sh": ["num_prompts=7473"]}
ALL = sorted(file.name for file in CONFIGS.iterdir())


def text_of(name: str, *more: str) -> str:
    return run_file(name.partition("_")[0], str(CONFIGS / name), [*MORE.get(name, []), *more])


def run_of(name: str, *more: str) -> RunConfig:
    return validated(parse(text_of(name, *more), source=name))


def algorithm_of(name: str, *more: str) -> dict[str, Any]:
    return parse(text_of(name, *more), source=name)["algorithm"]


def refused(name: str, *more: str) -> str:
    with pytest.raises(ConfigError) as caught:
        text_of(name, *more)
    return str(caught.value)


def test_grpo_of_trl():
    run = run_of("trl_gsm8k.yaml")
    # 8 completions on each of 4 processes, 4 times accumulated: 128, which are 16 groups of 8, in one update.
    assert (run.buffer.groups_per_step, run.buffer.trajectories_per_group, run.learner.updates_per_step) == (16, 8, 1)
    assert (run.num_steps, run.optimizer.warmup_steps, run.optimizer.schedule) == (500, 50, "cosine")
    # The last of 450 steps down to 0, which the next would have: sin²(π / 900).
    assert run.optimizer.min_learning_rate_share == pytest.approx(math.sin(math.pi / 900) ** 2)
    assert {name: part.weight for name, part in run.reward.parts.items()} == {"is_right": 1.0, "is_tidy": 0.2}
    data = {"path": "openai/gsm8k", "split": "train", "config": "main"}
    assert run.prompts.params == data | {"column": "prompt", "text_as": "text"}
    assert algorithm_of("trl_gsm8k.yaml") == {
        "advantage": {"name": "grpo", "epsilon": 1e-4},
        "policy_loss": {"name": "ppo_clip"},  # one update: no bound can act
        "aggregation": "sequence_mean",
        "kl": {"loss": {"coefficient": 0.04, "estimator": "k3"}},
        "proximal": "recompute",
        "corrections": [{"name": "icepop", "level": "sequence", "low": 0.0, "high": 3.0}],
    }


def test_dapo_of_trl_with_several_updates_a_generation():
    run = run_of("trl_dapo.json")
    # 4 x 8 x 16 = 512 completions, 32 groups of 16; 16 steps of a generation, 4 to an update.
    assert (run.buffer.groups_per_step, run.learner.mini_batches, run.learner.epochs) == (32, 4, 2)
    # Twice 17,000 prompts, 32 a step: 2 x 531.25, whole.
    assert run.num_steps == 1062
    assert algorithm_of("trl_dapo.json") == {
        "advantage": {"name": "grpo", "epsilon": 1e-4},
        "policy_loss": {"name": "ppo_clip", "epsilon_low": 0.2, "epsilon_high": 0.28},
        "aggregation": "token_mean",
        "filters": ["overlong_mask"],
        "proximal": "recompute",
        "corrections": [{"name": "tis", "level": "token", "floor": 0.0, "cap": 2.0}],
    }


def test_steps_of_trl_are_updates_and_ours_are_generations():
    # 531 generations of 8 updates, and 24 updates of warm-up.
    run = run_of("trl_dapo.json", "max_steps=4248", "warmup_steps=24", "lr_scheduler_type=linear")
    assert (run.num_steps, run.optimizer.warmup_steps) == (531, 3)
    # The last of 528 steps down to 0, which the next would have.
    assert run.optimizer.min_learning_rate_share == 1 / 528


def test_dr_grpo_of_trl_with_an_adapter():
    run, algorithm = run_of("trl_dr_grpo.yaml"), algorithm_of("trl_dr_grpo.yaml")
    assert algorithm["advantage"] == {"name": "mean_centered"}
    assert algorithm["aggregation"] == "sequence_sum_over_length" and run.sampling.max_tokens == 512
    assert run.learner.lora and (run.learner.lora.rank, run.learner.lora.alpha) == (16, 32)
    assert run.reward.judge.params["function"] == "trl.rewards:accuracy_reward"


def test_grpo_of_verl_from_a_script():
    run = run_of("verl_gsm8k.sh")
    assert (run.buffer.groups_per_step, run.buffer.trajectories_per_group, run.learner.mini_batches) == (1024, 5, 4)
    # 15 epochs of 7 whole batches.
    assert (run.num_steps, run.evaluation.every_steps, run.run_dir) == (105, 5, "runs/gsm8k_grpo")
    assert run.prompts.params == {"path": "data/gsm8k/train.parquet", "column": "prompt"}
    assert (run.prompts.max_prompt_tokens, run.prompts.on_long_prompt) == (512, "drop")
    assert algorithm_of("verl_gsm8k.sh") == {
        "advantage": {"name": "grpo", "epsilon": 1e-6, "singleton": "raw"},
        "policy_loss": {
            "name": "ppo_clip",
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            "dual_clip": 3.0,
            "log_ratio_clamp": 20.0,
        },
        "aggregation": "token_mean",
        "kl": {"loss": {"coefficient": 0.001, "estimator": "k3", "log_ratio_clamp": 20.0}},
        "entropy_coefficient": 0,
        "proximal": "recompute",
    }


def test_verl_cuts_long_prompts_at_their_start_whatever_its_truncation():
    run, text = run_of("verl_gsm8k.sh"), text_of("verl_gsm8k.sh", "data.filter_overlong_prompts=False")
    held_out = run.evaluation.prompts
    assert held_out and (held_out.max_prompt_tokens, held_out.on_long_prompt) == (512, "drop")
    assert text.count("on_long_prompt: truncate_start") == 2 and "data.truncation=error has no effect in verl" in text
    assert "data.truncation=left has" not in text_of("verl_dapo.yaml")


def test_verl_computes_in_the_type_of_its_mixed_precision():
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    text = text_of("verl_gsm8k.sh", f"{fsdp}.mixed_precision.param_dtype=fp32")
    assert "dtype: float32\n" in text and "fsdp_config.dtype" not in text
    text = text_of("verl_gsm8k.sh", f"{fsdp}.dtype=float16")
    assert "dtype: bfloat16\n" in text and "fsdp_config.dtype=float16 has no effect in verl" in text


def test_ppo_of_verl_with_a_critic():
    run, algorithm = run_of("verl_ppo.yaml"), algorithm_of("verl_ppo.yaml")
    assert algorithm["advantage"] == {"name": "gae", "gamma": 1.0, "lambda_": 0.95}
    assert algorithm["advantage_shaping"] == ["whiten"]
    # Its two-sided settings are null, so that `clip_ratio` counts.
    assert algorithm["policy_loss"]["epsilon_low"] == algorithm["policy_loss"]["epsilon_high"] == 0.1
    assert algorithm["kl"] == {"reward": {"coefficient": 0.001, "estimator": "k1"}}
    # verl counts steps from 1, and its actor learns from step 10 on.
    value = run.algorithm.value
    assert value and (value.learning_rate, value.warmup_steps, value.path) == (1e-5, 9, "Qwen/Qwen2.5-0.5B")
    assert value.loss.params == {"clip_range": 0.2} and not value.trust_remote_code
    trusting = run_of("verl_ppo.yaml", "critic.model.trust_remote_code=true").algorithm.value
    assert trusting and trusting.trust_remote_code
    # A tenth of 290 steps.
    assert run.optimizer.warmup_steps == 29 and run.learner.mini_batches == 4
    assert run.reward.judge.params == {"function": "rewards:my_score"}
    assert set(run.prompts.sources) == {"data_gsm8k_train", "data_math_train"}


def test_dapo_of_verl():
    algorithm = algorithm_of("verl_dapo.yaml")
    penalty = {"name": "overlong_penalty", "max_length": 20480, "cache": 4096, "penalty": 1.0}
    assert algorithm["reward_shaping"] == [penalty] and algorithm["filters"] == ["zero_variance"]
    assert (algorithm["policy_loss"]["epsilon_high"], algorithm["policy_loss"]["dual_clip"]) == (0.28, 10.0)
    assert algorithm["corrections"] == [{"name": "tis", "level": "token", "cap": 2.0, "log_ratio_clamp": 20.0}]
    assert run_of("verl_dapo.yaml").learner.mini_batches == 16


def test_dapos_penalty_of_verl_may_have_its_legacy_name():
    old = "reward_model.reward_kwargs"
    buffer = [
        f"{old}.overlong_buffer_cfg.{each}" for each in ("enable=true", "len=512", "penalty_factor=0.5", "log=false")
    ]
    penalty = {"name": "overlong_penalty", "max_length": 8192, "cache": 512, "penalty": 0.5}
    more = ["reward_model.reward_manager=dapo", *buffer, f"{old}.max_resp_len=8192"]
    assert algorithm_of("verl_gsm8k.sh", *more)["reward_shaping"] == [penalty]
    # The legacy mapping stands in the place of the whole other one.
    assert "reward_shaping" not in algorithm_of("verl_dapo.yaml", f"{old}.max_resp_len=8192")


def test_dr_grpo_of_verl():
    algorithm = algorithm_of("verl_dr_grpo.yaml")
    assert algorithm["advantage"] == {"name": "mean_centered", "singleton": "raw"}
    assert algorithm["aggregation"] == {"name": "sequence_sum_over_length", "max_length": 3000}


@pytest.mark.parametrize("name", ALL)
def test_every_setting_of_a_file_is_named_in_the_run_file(name):
    text = text_of(name)
    assert [each for each in PEERS[name.partition("_")[0]].read(str(CONFIGS / name), []) if each not in text] == []


def test_bounds_that_cannot_act_in_one_update_are_left_out_and_named():
    # One update a step: 128 of 128 prompts.
    text = text_of("verl_dr_grpo.yaml")
    assert "policy_loss: {name: ppo_clip}\n" in text
    assert (
        "give ppo_clip back: epsilon_low: 0.2, epsilon_high: 0.2, dual_clip: 3.0, log_ratio_clamp: 20.0."
        in " ".join(text.replace("#", "").split())
    )


@pytest.mark.parametrize(
    ("mode", "loss"),
    [
        ("vanilla", "ppo_clip"),
        ("gspo", "gspo_token"),
        ("sapo", "sapo"),
        ("gpg", "reinforce"),
        ("cispo", "cispo"),
        ("dro", "dro"),
    ],
)
@pytest.mark.parametrize("part", [128, 64])
def test_every_loss_of_verl_makes_an_objective(mode, loss, part):
    actor = "actor_rollout_ref.actor"
    more = [
        f"{actor}.policy_loss.loss_mode={mode}",
        f"{actor}.ppo_mini_batch_size={part}",
        f"{actor}.policy_loss.dro_beta=1.0",
    ]
    run = run_of("verl_dr_grpo.yaml", *more, f"{actor}.loss_agg_mode=seq-mean-token-mean")
    assert (run.learner.mini_batches, run.algorithm.policy_loss.name) == (128 // part, loss)
    Objective.of_run(run)


def test_a_gspo_of_older_verls_is_aggregated_otherwise_and_the_run_file_says_so():
    actor, said = "actor_rollout_ref.actor", "# verl before 0.9.1 ignores loss_agg_mode with loss_mode=gspo"
    gspo = f"{actor}.policy_loss.loss_mode=gspo"
    assert said in text_of("verl_gsm8k.sh", gspo) and said not in text_of("verl_gsm8k.sh")
    assert said not in text_of("verl_gsm8k.sh", gspo, f"{actor}.loss_agg_mode=seq-mean-token-mean")


def test_verls_shuffle_deals_trajectories_to_mini_batches():
    """verl: a DataLoader with `shuffle` over the rows of a batch, anew in every epoch."""
    shuffle, part = "actor_rollout_ref.actor.shuffle=true", "actor_rollout_ref.actor.ppo_mini_batch_size"
    assert run_of("verl_dr_grpo.yaml", shuffle, f"{part}=64").learner.split_by == "trajectories"
    assert run_of("verl_dr_grpo.yaml", f"{part}=64").learner.split_by == "groups"
    assert run_of("verl_dr_grpo.yaml", shuffle, f"{part}=128").learner.split_by == "groups"  # one mini-batch


def test_no_ratio_is_below_the_lower_bound_that_verl_has_for_cispo():
    actor = "actor_rollout_ref.actor"
    more = [f"{actor}.policy_loss.loss_mode=cispo", f"{actor}.clip_ratio_low=10", f"{actor}.ppo_mini_batch_size=64"]
    loss = run_of("verl_dr_grpo.yaml", *more).algorithm.policy_loss
    assert loss.name == "cispo" and loss.params.get("epsilon_min", 0.0) == 0.0


def test_verls_bypass_mode_has_the_loss_of_its_name_without_weights():
    correction, note = "algorithm.rollout_correction", "have no effect in verl with bypass_mode"
    more = ["actor_rollout_ref.actor.policy_loss.loss_mode=gspo", f"{correction}.bypass_mode=true"]
    algorithm = algorithm_of("verl_gsm8k.sh", *more)
    assert (algorithm["policy_loss"]["name"], algorithm["proximal"]) == ("gspo_token", "rollout")
    assert "corrections" not in algorithm and note not in text_of("verl_gsm8k.sh", *more)
    for idle in ("loss_type=reinforce", "rollout_is=token", "rollout_rs=seq_mean_k1"):
        assert algorithm_of("verl_gsm8k.sh", *more, f"{correction}.{idle}") == algorithm
        assert note in " ".join(text_of("verl_gsm8k.sh", *more, f"{correction}.{idle}").replace("#", "").split())


def test_a_filter_of_verl_keeps_groups_of_one():
    assert "filters" not in algorithm_of("verl_dapo.yaml", "actor_rollout_ref.rollout.n=1")


def test_verl_corrects_nothing_without_the_rollouts_log_probs():
    assert "corrections" in algorithm_of("verl_dapo.yaml")
    without = "actor_rollout_ref.rollout.calculate_log_probs=false"
    assert "corrections" not in algorithm_of("verl_dapo.yaml", without)
    assert "no effect in verl without rollout.calculate_log_probs" in text_of("verl_dapo.yaml", without)


def test_a_cap_that_is_verls_own_error_is_refused_by_its_name():
    with pytest.raises(ConfigError, match=r"actor\.clip_ratio_c=1\.0 is an error in verl too; set it above 1"):
        run_of("verl_dr_grpo.yaml", "actor_rollout_ref.actor.clip_ratio_c=1.0")


@pytest.mark.parametrize(
    ("kind", "loss", "aggregation"),
    [
        ("grpo", "ppo_clip", "sequence_mean"),
        ("dapo", "ppo_clip", "token_mean"),
        ("dr_grpo", "ppo_clip", "sequence_sum_over_length"),
        ("cispo", "cispo", "token_mean"),
        ("sapo", "sapo", "sequence_mean"),
        ("luspo", "gspo", "sequence_sum_mean"),
    ],
)
@pytest.mark.parametrize("accumulation", [4, 2])
def test_every_loss_of_trl_makes_an_objective(kind, loss, aggregation, accumulation):
    more = [
        f"loss_type={kind}",
        f"gradient_accumulation_steps={accumulation}",
        "steps_per_generation=4",
        "epsilon_high=0.3",
    ]
    more += ["importance_sampling_level=sequence", "beta=0"] if kind == "luspo" else []
    run = run_of("trl_gsm8k.yaml", *more)
    assert run.learner.mini_batches == 4 // accumulation
    assert (run.algorithm.policy_loss.name, run.algorithm.aggregation.name) == (loss, aggregation)
    Objective.of_run(run)


@pytest.mark.parametrize("name", ALL)
def test_a_row_reads_and_makes_what_it_says(name):
    peer = PEERS[name.partition("_")[0]]
    given = Given(values=peer.read(str(CONFIGS / name), MORE.get(name, [])), defaults=peer.defaults, types=peer.types)
    for row in peer.rows:
        made = row.make(given)
        assert set(given.read) <= set(row.of.split()), row.ours
        assert set(made) <= set(row.ours.split()), row.ours
        given.drain_read()


@pytest.mark.parametrize("system", PEERS)
def test_a_table_has_a_row_for_each_of_its_settings(system):
    peer = PEERS[system]
    assert {name for row in peer.rows for name in row.of.split()} == set(peer.defaults)


def test_all_that_cannot_be_said_is_refused_at_once():
    message = refused("trl_gsm8k.yaml", "loss_type=bnpo", "sync_ref_model=true", "optim=sgd", "temprature=0.7")
    for said in (
        "loss_type='bnpo' divides by the tokens of one device's micro-batch",
        "sync_ref_model=True is not supported: the reference model is fixed",
        "optim='sgd' is not supported: the optimizer is AdamW",
        "temprature=0.7 is not a known setting of TRL 1.16.0",
    ):
        assert said in message
    assert message.startswith(f"{CONFIGS / 'trl_gsm8k.yaml'}: 4 problem(s)")


@pytest.mark.parametrize(
    ("name", "setting", "said"),
    [
        ("trl_gsm8k.yaml", "num_generations=7", "does not divide the 128 completions"),
        ("trl_gsm8k.yaml", "steps_per_generation=6", "does not divide the 6 steps of a generation"),
        ("trl_gsm8k.yaml", "max_steps=-1", "--set num_prompts=7473"),
        ("trl_gsm8k.yaml", "entropy_coef=0.01", "use dapo"),
        ("trl_gsm8k.yaml", "mask_truncated_completions=true", "use dapo"),
        ("trl_gsm8k.yaml", "reward_weights=[1]", "does not have 2 entries, as reward_funcs does"),
        ("trl_gsm8k.yaml", "beta=high", "beta='high' must be a number"),
        ("trl_gsm8k.yaml", "learning_rate=null", "learning_rate=None must be a number"),
        ("trl_gsm8k.yaml", "use_vllm=1", "use_vllm=1 must be true or false"),
        ("trl_gsm8k.yaml", "delta=[4]", "delta=[4] must be a number or null"),
        ("trl_gsm8k.yaml", "gradient_accumulation_steps=0", "must be a whole number above 0"),
        ("trl_gsm8k.yaml", "num_processes=1.5", "must be a whole number above 0"),
        ("trl_gsm8k.yaml", "reward_funcs=[3]", "names no reward"),
        (
            "trl_gsm8k.yaml",
            "num_train_epochs=.inf max_steps=-1 num_prompts=7",
            "num_train_epochs=inf must be a finite number",
        ),
        ("trl_gsm8k.yaml", "max_steps=-1 num_prompts=-7", "num_prompts=-7 must be a whole number above 0"),
        ("verl_gsm8k.sh", "num_prompts=0.5", "num_prompts=0.5 must be a whole number above 0"),
        ("trl_gsm8k.yaml", "bf16=false dtype=auto", "use float32 or bfloat16"),
        ("trl_gsm8k.yaml", "router_aux_loss_coef=0.001", "write algorithm.router_aux_loss_coefficient"),
        ("trl_gsm8k.yaml", "~beta=1", "~beta=1 is not a known setting of TRL"),
        ("trl_dr_grpo.yaml", "lora_target_modules=null", "PEFT's choice"),
        ("trl_dr_grpo.yaml", "importance_sampling_level=sequence beta=0.1", "set it to false"),
        ("verl_gsm8k.sh", "actor_rollout_ref.actor.kl_loss_type=kl", "use low_var_kl or mse"),
        ("verl_gsm8k.sh", "algorithm.adv_estimator=remax", "is not supported; use one of grpo"),
        ("verl_gsm8k.sh", "actor_rollout_ref.actor.ppo_mini_batch_size=300", "does not divide"),
        ("verl_gsm8k.sh", "actor_rollout_ref.rollout.temprature=0.7", "is not a known setting of verl 0.9.1"),
        ("verl_gsm8k.sh", "data.train_files=${data}/train.parquet", "is not resolved"),
        ("verl_dapo.yaml", "algorithm.filter_groups.metric=acc", "use reward"),
        ("verl_dapo.yaml", "algorithm.filter_groups.metric=score", "use reward"),
        ("verl_dapo.yaml", "algorithm.rollout_correction.rollout_is_threshold=a_b", "is not a bound"),
        ("verl_gsm8k.sh", "data.train_batch_size=0", "must be a whole number above 0"),
        ("verl_gsm8k.sh", "trainer.critic_warmup=10", "as there is no critic"),
        ("verl_dapo.yaml", "reward.reward_kwargs.max_resp_len=16384", "verl's penalty grows further"),
        ("verl_gsm8k.sh", "trainer.val_only=true", "use `treadwheel eval`"),
        ("verl_gsm8k.sh", "trainer.use_v1=false", "verl's old trainer"),
        (
            "verl_gsm8k.sh",
            "data.apply_chat_template_kwargs.enable_thinking=false",
            "{'enable_thinking': False} is not supported: write it into the model's folder",
        ),
        (
            "verl_gsm8k.sh",
            "actor_rollout_ref.actor.optim.override_optimizer_config.eps=1e-5",
            "is not supported: the optimizer is AdamW",
        ),
        ("verl_gsm8k.sh", "actor_rollout_ref.rollout.response_length=7", "differs from data.max_response_length"),
        ("verl_gsm8k.sh", "actor_rollout_ref.rollout.prompt_length=7", "differs from data.max_prompt_length"),
        ("verl_gsm8k.sh", "actor_rollout_ref.model.lora.rank=32", "write the adapter as model.lora_rank"),
        ("verl_gsm8k.sh", "actor_rollout_ref.actor.qat.enable=true", "not quantized"),
        ("verl_gsm8k.sh", "actor_rollout_ref.rollout.enable_rollout_routing_replay=true", "leave it out"),
        ("verl_gsm8k.sh", "data.sampler.class_path=mine.py", "is not a known setting of verl"),
        (
            "verl_gsm8k.sh",
            "reward_model.overlong_buffer.enable=true",
            "is not a known setting of verl 0.9.1; write it below reward.reward_kwargs.overlong_buffer_cfg",
        ),
        ("trl_gsm8k.yaml", "warmup_ratio=0.1", "of TRL 1.16.0; write it as warmup_steps, which below 1 is a share"),
        ("trl_gsm8k.yaml", "torch_dtype=bfloat16", "of TRL 1.16.0; write it as dtype"),
        (
            "trl_gsm8k.yaml",
            "max_prompt_length=512",
            "write prompts.max_prompt_tokens, with on_long_prompt: truncate_start",
        ),
        ("trl_gsm8k.yaml", "system_prompt=Think", "write it as prompts.system_prompt into the run file"),
        ("verl_gsm8k.sh", "reward.reward_manager.name=prime", "reward.reward_manager.name='prime' is not supported"),
        ("verl_gsm8k.sh", "reward_model.reward_manager=prime", "reward_model.reward_manager='prime' is not supported"),
        ("verl_gsm8k.sh", "reward.reward_manager.source=importlib", "write your reward manager as a judge"),
        ("verl_gsm8k.sh", "reward_model.reward_loop_source=importlib", "write your reward manager as a judge"),
        ("verl_gsm8k.sh", "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp16", "use bf16 or fp32"),
        (
            "verl_gsm8k.sh",
            "actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32}",
            "write only its param_dtype",
        ),
        ("verl_gsm8k.sh", "actor_rollout_ref.actor.policy_loss.loss_mode=sapo", "use seq-mean-token-mean"),
        ("verl_ppo.yaml", "critic.optim.clip_grad=0.5", "is not the actor's, 1.0"),
        ("verl_ppo.yaml", "critic.optim.optimizer=AdamW8bit", "is not the actor's, 'AdamW'"),
        ("verl_dr_grpo.yaml", "actor_rollout_ref.actor.loss_scale_factor=null", "padded width of a batch"),
        ("verl_ppo.yaml", "critic.optim.weight_decay=0.1", "is not the actor's, 0.01"),
        ("verl_ppo.yaml", "algorithm.kl_ctrl.type=adaptive", "use fixed"),
    ],
)
def test_what_is_refused_has_a_way_out(name, setting, said):
    assert said in refused(name, *setting.split())


@pytest.mark.parametrize(
    "setting",
    [
        "agent.agent_loop_config_path=agent.yaml",
        "agent.agent_loop_manager_class=my_agents.Manager",
        "multi_turn.tool_config_path=tools.yaml",
        "multi_turn.function_tool_path=tools.py",
    ],
)
def test_agents_and_tools_of_verl_are_refused_without_its_switch_too(setting):
    """Rows that name an agent in a column `agent_name` need no switch."""
    assert "write turns and tools as an environment" in refused("verl_gsm8k.sh", f"actor_rollout_ref.rollout.{setting}")
    # As in every resolved configuration.
    text_of("verl_gsm8k.sh", f"actor_rollout_ref.rollout.{setting.partition('=')[0]}=null")


def test_a_setting_without_a_place_is_not_advised_to_be_left_out():
    """Seen before: a warm-up of an older release was lost by the advice."""
    said = refused("trl_gsm8k.yaml", "temprature=0.7")
    assert "write that release's setting; remove it only if it does not change learning" in said
    assert "leave it out" not in said


@pytest.mark.parametrize("system", PEERS)
def test_a_setting_that_moved_is_in_no_other_part_of_the_table(system):
    peer = PEERS[system]
    assert [name for name in peer.moved if name in peer.defaults or peer.reason_to_drop(name)] == []


def test_files_of_like_names_stay_apart():
    sources = verl._source(["a/b-c.parquet", "a/b_c.parquet", "a/b_c.jsonl"], "prompt")["sources"]
    assert [each["path"] for each in sources.values()] == ["a/b-c.parquet", "a/b_c.parquet", "a/b_c.jsonl"]


@pytest.mark.parametrize("more", ["beta=0.1", "vllm_importance_sampling_mode=token_mask", "top_entropy_quantile=0.5"])
def test_luspo_of_trl_sums_the_losses_of_tokens(more):
    algorithm = run_of("trl_gsm8k.yaml", "loss_type=luspo", "importance_sampling_level=token", more).algorithm
    assert (algorithm.policy_loss.name, algorithm.aggregation.name) == ("ppo_clip", "sequence_sum_mean")


def test_the_size_in_which_verl_fetches_prompts_changes_nothing_where_it_divides_the_batch():
    batch = run_of("verl_gsm8k.sh").buffer
    assert run_of("verl_gsm8k.sh", "data.gen_batch_size=256").buffer == batch
    assert "data.gen_batch_size=3072 does not divide data.train_batch_size=1024" in refused(
        "verl_gsm8k.sh", "data.gen_batch_size=3072"
    )


def test_updates_that_are_no_whole_generation_are_told():
    """Seen before: 500 updates were 496 without a word."""
    said = "# TRL makes 500 updates, and each step here all 8 of a generation: 496 in 62 steps.\n"
    assert said in text_of("trl_dapo.json", "max_steps=500")
    assert "TRL makes" not in text_of("trl_dapo.json", "max_steps=496")
    assert "TRL makes 3 updates, and each step here all 8 of a generation: 8 in 1 step." in text_of(
        "trl_dapo.json", "max_steps=3"
    )


def test_verl_validates_on_all_rows_and_the_run_file_says_that_ours_has_a_number():
    """Seen before: a benchmark of 1,319 rows was evaluated on its first 256 without a word."""
    said = "# verl validates on all rows of val_files. Here set evaluation.num_prompts to their number.\n"
    assert said in text_of("verl_gsm8k.sh") and run_of("verl_gsm8k.sh").evaluation.num_prompts == 256
    assert said not in text_of("verl_gsm8k.sh", "data.val_files=null")


def test_an_evaluation_samples_as_training_does_and_the_run_file_says_where_verl_does_not():
    """Seen before: verl's default of all tokens was not told beside a training with top_p."""
    rollout = "actor_rollout_ref.rollout"
    said, drawn = "# verl validates with top_p=", f"{rollout}.val_kwargs.temperature=1.0"
    assert said in text_of("verl_gsm8k.sh", drawn, f"{rollout}.top_p=0.9")
    assert said in text_of("verl_gsm8k.sh", drawn, f"{rollout}.val_kwargs.top_p=0.7")
    assert said in text_of("verl_gsm8k.sh", drawn, f"{rollout}.val_kwargs.top_k=20")
    assert said not in text_of("verl_gsm8k.sh", drawn, f"{rollout}.top_p=0.9", f"{rollout}.val_kwargs.top_p=0.9")
    assert said not in text_of("verl_gsm8k.sh", f"{rollout}.top_p=0.9")  # the likeliest token is in any of them


def test_a_share_of_epochs_ends_where_trl_ends():
    # A quarter of 531 generations of 8 updates: 1,062 updates, of which the last generation has 6, and is left out.
    assert run_of("trl_dapo.json", "num_train_epochs=0.25").num_steps == 132
    # 3 generations of one update an epoch: half of them are 1.5 updates, rounded up.
    assert run_of("trl_gsm8k.yaml", "max_steps=-1", "num_prompts=48", "num_train_epochs=0.5").num_steps == 2


def test_a_decay_of_two_steps_learns_in_both():
    # cos² of an eighth of a turn.
    assert run_of("trl_gsm8k.yaml", "max_steps=2", "warmup_steps=0").optimizer.min_learning_rate_share == pytest.approx(
        0.5
    )
    optim = "actor_rollout_ref.actor.optim"
    more = [f"{optim}.lr_scheduler_type=cosine", f"{optim}.min_lr_ratio=0.1", "trainer.total_training_steps=2"]
    assert run_of("verl_gsm8k.sh", *more).optimizer.min_learning_rate_share == pytest.approx(0.1 + 0.9 / 2)


def test_a_cosine_of_trl_may_end_at_a_share_of_its_rate():
    cosine, share = "lr_scheduler_type=cosine_with_min_lr", "lr_scheduler_kwargs={min_lr_rate: 0.1}"
    optimizer = run_of("trl_gsm8k.yaml", cosine, share, "max_steps=2", "warmup_steps=0").optimizer
    # Half way from the rate to a tenth of it.
    assert (optimizer.schedule, optimizer.min_learning_rate_share) == ("cosine", pytest.approx(0.55))
    for other in ("{min_lr: 1e-7}", "{min_lr_rate: 0.1, num_cycles: 1}", "{min_lr_rate: 10}", "null"):
        said = refused("trl_gsm8k.yaml", cosine, f"lr_scheduler_kwargs={other}")
        assert "is not supported; write only min_lr_rate, a share of learning_rate" in said
    said = refused("trl_gsm8k.yaml", "lr_scheduler_type=cosine", share)
    assert "lr_scheduler_kwargs={'min_lr_rate': 0.1} is not supported with this lr_scheduler_type" in said
    assert "lr_scheduler_kwargs='a' must be a mapping or null" in refused("trl_gsm8k.yaml", "lr_scheduler_kwargs=a")


def test_both_settings_of_trls_batch_may_stand_where_they_agree():
    # 8 on each of 4 processes, 4 times.
    both = ["generation_batch_size=128", "steps_per_generation=4"]
    assert run_of("trl_gsm8k.yaml", *both).buffer.groups_per_step == 16
    said = refused("trl_gsm8k.yaml", *both, "num_processes=8")
    assert "generation_batch_size=128 do not agree for num_processes=8" in said


@pytest.mark.parametrize(
    ("bf16", "dtype", "computed"),
    [("null", "float32", "bfloat16"), ("false", "float32", "float32"), ("false", "bfloat16", "bfloat16")],
)
def test_trl_computes_in_the_type_of_the_weights_without_bf16(bf16, dtype, computed):
    assert run_of("trl_gsm8k.yaml", f"bf16={bf16}", f"dtype={dtype}").model.dtype == computed


def test_the_routers_loss_of_trl_is_that_of_the_model_unless_it_is_0():
    note = "On a mixture of experts TRL adds the router's loss"
    assert note in text_of("trl_gsm8k.yaml") and note not in text_of("trl_gsm8k.yaml", "router_aux_loss_coef=0")


def test_verl_ends_with_its_epochs_or_its_steps_whichever_is_sooner():
    note = "verl also ends after trainer.total_epochs=15"
    # 15 epochs of 7 whole batches are 105 steps.
    assert run_of("verl_gsm8k.sh", "trainer.total_training_steps=500").num_steps == 105
    assert run_of("verl_gsm8k.sh", "trainer.total_training_steps=50").num_steps == 50
    assert note in text_of("verl_gsm8k.sh", "trainer.total_training_steps=50", "num_prompts=null")
    assert note not in text_of("verl_gsm8k.sh")


def test_verls_schedule_is_of_all_its_training_steps():
    optim = "actor_rollout_ref.actor.optim"
    more = [
        f"{optim}.lr_scheduler_type=cosine",
        f"{optim}.lr_warmup_steps_ratio=0.05",
        "trainer.total_training_steps=100",
    ]
    run = run_of("verl_gsm8k.sh", *more, "num_prompts=5120", "trainer.total_epochs=8")
    # The last of 40 steps, whose first 5 are the warm-up: 34 of the 95 steps of a decay.
    assert (run.num_steps, run.optimizer.warmup_steps) == (40, 5)
    assert run.optimizer.min_learning_rate_share == pytest.approx(0.5 + 0.5 * math.cos(math.pi * 34 / 95))


def test_a_cosine_of_verl_that_counts_its_steps_from_1_is_refused_and_a_constant_rate_has_no_steps_to_count():
    actor, critic = "actor_rollout_ref.actor.optim", "critic.optim"
    constant = run_of("verl_gsm8k.sh", f"{actor}.zero_indexed_step=false")
    assert constant.optimizer.schedule == "constant"
    decayed = [f"{actor}.lr_scheduler_type=cosine", "trainer.total_training_steps=100"]
    from_0 = run_of("verl_gsm8k.sh", *decayed, f"{actor}.zero_indexed_step=true", f"{critic}.zero_indexed_step=false")
    assert from_0.optimizer == run_of("verl_gsm8k.sh", *decayed).optimizer
    said = refused("verl_gsm8k.sh", *decayed, f"{actor}.zero_indexed_step=false")
    assert f"{actor}.zero_indexed_step=False counts the cosine's steps from 1, which moves it by one step" in said
    both = [*decayed, f"{critic}.lr_scheduler_type=cosine"]
    said = refused("verl_ppo.yaml", *both, f"{critic}.zero_indexed_step=false")
    assert f"{critic}.zero_indexed_step=False counts the cosine's steps from 1" in said


def test_a_reward_of_a_package_keeps_its_whole_name():
    for path in ("pkg://my.rewards.gsm8k", "pkg://my/rewards/gsm8k"):
        run = run_of("verl_gsm8k.sh", f"reward.custom_reward_function.path={path}")
        assert run.reward.judge.params == {"function": "my.rewards.gsm8k:compute_score"}


def test_a_note_says_where_the_module_of_a_reward_function_is_looked_for():
    text = text_of("verl_gsm8k.sh", "reward.custom_reward_function.path=code/my_score.py")
    advice = "put my_score.py into the folder in which you start the command, or name its folder in PYTHONPATH."
    assert f"The reward function is imported as a module: {advice}" in " ".join(text.replace("\n#", "").split())


def test_verls_old_names_of_a_reward_function_replace_the_new_ones():
    old, new = "custom_reward_function", "reward.custom_reward_function"
    run = run_of("verl_gsm8k.sh", f"{old}.path=old.py", f"{old}.name=score", f"{new}.path=new.py", f"{new}.name=other")
    assert run.reward.judge.params == {"function": "old:score"}
    run = run_of("verl_gsm8k.sh", f"{old}.name=score", f"{new}.path=new.py")
    assert run.reward.judge.params == {"function": "verl.utils.reward_score:default_compute_score"}


@pytest.mark.parametrize("section", ["custom_reward_function", "reward.custom_reward_function"])
def test_reward_kwargs_of_verl_are_kwargs_of_the_judge(section):
    more = f"{section}.path=score.py", f"+{section}.reward_kwargs.weight=0.5", f"+{section}.reward_kwargs.strict=true"
    kwargs = {"weight": 0.5, "strict": True}
    assert run_of("verl_gsm8k.sh", *more).reward.judge.params == {"function": "score:compute_score", "kwargs": kwargs}
    said = refused("verl_gsm8k.sh", *more, f"{section}.reward_kwargs.inner.x=1")
    assert "has sections or values that are not resolved; write them as the judge's kwargs" in said


def test_rewards_that_are_normalised_apart_are_parts():
    run = run_of("trl_dr_grpo.yaml", "multi_objective_aggregation=normalize_then_sum")
    assert run.algorithm.advantage.name == "gdpo" and set(run.reward.parts) == {"accuracy_reward"}


def test_a_pull_of_no_strength_is_none():
    assert "kl" not in algorithm_of("verl_gsm8k.sh", "actor_rollout_ref.actor.kl_loss_coef=0")
    assert "kl" not in algorithm_of("verl_ppo.yaml", "algorithm.kl_ctrl.kl_coef=0.0")


def test_all_linear_may_be_a_list_of_one():
    lora = run_of("trl_dr_grpo.yaml", "lora_target_modules=[all-linear]").learner.lora
    assert lora and lora.target_modules == "all-linear"


def test_adapters_of_trl_have_no_dropout_here_and_the_run_file_says_so():
    """Seen before: TRL's default of 0.05 was written, and every run with it was refused."""
    note, lora = "lora_dropout=0.05: TRL learns with dropout", run_of("trl_dr_grpo.yaml").learner.lora
    assert lora and lora.dropout == 0 and note in text_of("trl_dr_grpo.yaml")
    for none in ("lora_dropout=0", "disable_dropout=true", "use_peft=false"):
        assert "TRL learns with dropout" not in text_of("trl_dr_grpo.yaml", none)


def test_verl_clips_by_the_optimizers_setting():
    actor = "actor_rollout_ref.actor"
    text = text_of("verl_gsm8k.sh", f"{actor}.grad_clip=0.5")
    assert "max_grad_norm: 1.0\n" in text and "actor.grad_clip=0.5 has no effect in verl" in text
    assert run_of("verl_gsm8k.sh", f"{actor}.optim.clip_grad=0.5").optimizer.max_grad_norm == 0.5


def test_sequence_parallelism_of_verl_is_that_of_the_smallest_learner_that_has_it():
    actor, name = "actor_rollout_ref.actor", "ulysses_sequence_parallel_size"
    assert "  sequence_parallel_size" not in text_of("verl_gsm8k.sh", f"{actor}.{name}=1", f"critic.{name}=2")
    for more in ([f"{actor}.{name}=4", f"{actor}.fsdp_config.{name}=2"], [f"{actor}.fsdp_config.{name}=4"]):
        learner = run_of("verl_gsm8k.sh", *more).learner
        assert (learner.sequence_parallel_size, learner.num_ranks) == (4, 4)
    assert f"{actor}.{name}=0 must be a whole number above 0" in refused("verl_gsm8k.sh", f"{actor}.{name}=0")


def test_a_script_is_read_for_words_with_continuations_comments_and_quotes(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        """set -x
# data.train_files=not_this.parquet
LR=2e-6
python3 -m verl.trainer.main_ppo \\
    data.train_files="['a b.parquet']" `# a comment` \\
    +actor_rollout_ref.actor.optim.lr=$LR \\
    ~trainer.logger=console $@
"""
    )
    assert hydra(str(script), []) == {
        "-m": "verl.trainer.main_ppo",
        "data.train_files": ["a b.parquet"],
        "actor_rollout_ref.actor.optim.lr": 2e-6,
        "~trainer.logger": "console",
    }


def test_a_variable_with_two_values_is_not_resolved(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("if true; then\nLR=1e-6\nelse\nLR=2e-6\nfi\npython x actor_rollout_ref.actor.optim.lr=$LR\n")
    assert hydra(str(script), []) == {"actor_rollout_ref.actor.optim.lr": "$LR"}


def test_the_default_of_a_variable_is_taken_and_named(tmp_path):
    script = tmp_path / "run.sh"
    lr = "actor_rollout_ref.actor.optim.lr"
    text = (CONFIGS / "verl_gsm8k.sh").read_text().replace(f"{lr}=1e-6", f"{lr}=$LR data.seed=${{SEED:-7}}")
    script.write_text("LR=${LR:-3e-6}\nexport WANDB_API_KEY=${WANDB_API_KEY:-sesame}\n" + text)
    imported = run_file("verl", str(script), ["num_prompts=7473"])
    run = validated(parse(imported, source="run.sh"))
    assert (run.optimizer.learning_rate, run.seed) == (3e-6, 7)
    said = "The environment may set variables of the script. Their defaults were taken: $LR=3e-6, $WANDB_API_KEY=<hidden>, $SEED=7."
    assert said in " ".join(imported.replace("\n#", "").split())


@pytest.mark.parametrize(
    "text",
    [
        "if x; then LR=2e-6; fi\npython x a.lr=${LR:-1e-6}",
        "python x a.steps=${LR:-1}\npython x a.lr=${LR:-2}",
        "python x a.lr=${LR:-$(date)}",
    ],
)
def test_a_default_that_may_not_be_the_value_is_not_resolved(tmp_path, text):
    assert isinstance(words_of(tmp_path, text)["a.lr"], Unresolved)


def test_the_home_folder_is_a_tilde_in_a_script(tmp_path):
    text = 'DATA=${DATA:-"$HOME/data"}\npython x a.path=${HOME}/m a.files="[\'$DATA/a.parquet\']"'
    found = words_of(tmp_path, text)
    assert (found["a.path"], found["a.files"]) == ("~/m", ["~/data/a.parquet"])


def words_of(folder: Path, text: str, *more: str) -> dict[str, Any]:
    script = folder / "run.sh"
    script.write_text(text)
    return hydra(str(script), more)


def refused_script(folder: Path, text: str) -> str:
    script = folder / "run.sh"
    script.write_text(text.replace("{lr}", "actor_rollout_ref.actor.optim.lr"))
    with pytest.raises(ConfigError) as caught:
        run_file("verl", str(script))
    return str(caught.value)


def test_words_of_a_variable_are_settings(tmp_path):
    text = """
ACTOR="
    a.lr=5e-7 \\
    a.steps=32"
ROLLOUT='a.n=16 a.top_p=0.9'
python x $ACTOR a.path=m \\
    "${ROLLOUT}"
"""
    assert words_of(tmp_path, text) == {"a.lr": 5e-7, "a.steps": 32, "a.path": "m", "a.n": 16, "a.top_p": 0.9}


@pytest.mark.parametrize(
    "text", ["{lr}=1 $MORE", "{lr}=1 ${MORE:-a.c=1}", "MORE=a.c=1; MORE=a.c=2; python x {lr}=1 ${MORE}"]
)
def test_an_unknown_variable_among_settings_is_refused(tmp_path, text):
    said = refused_script(tmp_path, f"cd $HOME\npython x {text}")
    assert "is not resolved; write its words in its place" in said and "$HOME" not in said


def test_options_of_what_starts_the_program_are_no_settings(tmp_path):
    text = 'ray job submit --working-dir "${WORKING_DIR:-$PWD}" -- python3 -m verl.trainer.main_ppo a.b=1'
    assert words_of(tmp_path, text) == {"-m": "verl.trainer.main_ppo", "a.b": 1}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--config-name gsm8k_multiturn_grpo",
            "--config-name='gsm8k_multiturn_grpo' is not supported: its settings are",
        ),
        (
            "--config-name=mine",
            "--config-name='mine' is not supported: its settings are in another file; add --cfg job",
        ),
        ("-cn mine", "--config-name='mine' is not supported"),
        ("--config-path /config -cn mine", "--config-path='/config' is not supported"),
        ("-cp /config", "--config-path='/config' is not supported"),
        ("model_engine=megatron", "model_engine='megatron' is not supported: the table is that of FSDP; use dp"),
    ],
)
def test_settings_of_another_file_are_refused(tmp_path, words, said):
    assert said in refused_script(tmp_path, f"python3 -m verl.trainer.main_ppo {words} {{lr}}=1e-6")


def test_another_program_of_verl_is_refused(tmp_path):
    """Seen before: a script of one_step_off_policy became a synchronous run."""
    said = "is not supported: another program has other defaults"
    other = "python3 -m verl.experimental.one_step_off_policy.main_ppo"
    assert f"-m='verl.experimental.one_step_off_policy.main_ppo' {said}" in refused_script(
        tmp_path, f"{other} {{lr}}=1"
    )
    assert said in refused_script(tmp_path, f'MORE=({{lr}}=1)\n{other} "${{MORE[@]}}"')
    assert said not in refused_script(tmp_path, "python3 -m verl.trainer.main_ppo {lr}=1")


def test_programs_without_settings_are_no_programs_of_the_run(tmp_path):
    text = (
        "mkdir -m 755 logs\npython3 -m sglang_router.launch_server --port 8000\npython3 -m verl.trainer.main_ppo a.b=1"
    )
    assert words_of(tmp_path, text) == {"-m": "verl.trainer.main_ppo", "a.b": 1}


def test_an_unknown_variable_beside_an_array_is_refused(tmp_path):
    text = 'MORE=({lr}=1)\npython3 -m verl.trainer.main_ppo "${MORE[@]}" $EXTRA'
    assert "$EXTRA='$EXTRA' is not resolved" in refused_script(tmp_path, text)


def test_verls_own_file_and_engine_may_be_named(tmp_path):
    text = "python x --config-path=config --config-name='ppo_trainer.yaml' model_engine=dp {lr}=1"
    assert "not supported" not in refused_script(tmp_path, text)


def test_words_of_an_array_are_settings_from_bracket_to_bracket(tmp_path):
    text = """MORE=(a.b=1  # (the first)
    "a.c=[x, y]" a.d=$((2 * (1 + 3))))
python x "${MORE[@]}" a.e=it#2"""
    values = {"a.b": 1, "a.c": ["x", "y"], "a.d": "$((2 * (1 + 3)))", "a.e": "it#2"}
    assert words_of(tmp_path, text) == values


def test_a_setting_of_two_branches_is_not_resolved(tmp_path):
    text = """if true; then
    ARGS=(a.b=1 a.c=x)  # don't mind
else
    ARGS=(a.b=2 a.c=x)
fi
python x "${ARGS[@]}"
"""
    assert words_of(tmp_path, text) == {"a.b": "1 or 2", "a.c": "x"}
    assert words_of(tmp_path, text, "a.b=2") == {"a.b": 2, "a.c": "x"}
    assert "lr='1e-06 or 2e-06' is not resolved" in refused_script(tmp_path, "python x {lr}=1e-6\npython x {lr}=2e-6")


def test_the_later_of_two_values_in_a_command_counts(tmp_path):
    assert words_of(tmp_path, "python x a.b=1 \\\n a.c=x \\\n a.b=2") == {"a.b": 2, "a.c": "x"}


def test_a_mapping_of_trl_is_a_value(tmp_path):
    config = tmp_path / "grpo.yaml"
    mappings = "deepspeed: {zero_optimization: {stage: 2}}\naccelerator_config: {split_batches: false}\nenv: {A: b}\n"
    config.write_text((CONFIGS / "trl_gsm8k.yaml").read_text() + mappings)
    text = run_file("trl", str(config))
    assert all(
        said in text
        for said in ("deepspeed", "accelerator_config", "(set environment variables where the run starts): env\n")
    )
    config.write_text("model_init_kwargs: {use_kernels: true}")
    with pytest.raises(ConfigError, match=r"model_init_kwargs=\{'use_kernels': True\} is not supported"):
        run_file("trl", str(config))


def test_settings_of_vllm_say_nothing_where_trl_samples_without_it():
    asked = ("vllm_structured_outputs_regex=a+", "vllm_max_model_length=2048")
    run = run_of("trl_gsm8k.yaml", *asked)
    assert (run.sampling.regex, run.model.max_context) == ("a+", 2048)
    run = run_of("trl_gsm8k.yaml", "use_vllm=false", *asked)
    assert (run.sampling.regex, run.model.max_context) == (None, None)


def test_a_dollar_stands_for_a_value_in_hydras_files_alone():
    assert run_of("trl_gsm8k.yaml", r"vllm_structured_outputs_regex=^\d+$").sampling.regex == r"^\d+$"
    assert "is not resolved" in refused("verl_dapo.yaml", "data.train_files=['${oc.env:HOME}/a.parquet']")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("missing.yaml", None, "cannot be read: No such file"),
        ("list.yaml", "- a\n", "is not a mapping of settings"),
        ("empty.yaml", "", "is not a mapping of settings"),
        ("broken.json", '{"a": [1, ', "cannot be read as JSON"),
        ("twice.json", '{"a": 1, "b": {"c": 1, "c": 2}}', "'c' is given 2 times"),
        ("deep.yaml", "[" * 2000, "nested too deeply"),
        ("README", "Nothing here.\n", "holds no settings as key=value"),
        ("open.sh", "a='b\n", "No closing quotation"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, name, text, said):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        run_file("verl", str(path))


def test_json_may_have_tabs_and_a_character_in_two_halves(tmp_path):
    """As `json.dumps(..., indent="\\t")` writes them."""
    said = {"output_dir": "runs/🚀", "seed": 3}
    (tmp_path / "grpo.json").write_text(json.dumps(said, indent="\t"))
    assert flat(str(tmp_path / "grpo.json"), []) == said


def test_what_verls_resolved_configuration_says_of_routers_and_kernels_is_no_problem():
    """Every one has it, of models without experts too."""
    actor = "actor_rollout_ref.actor"
    said = [
        *(f"actor_rollout_ref.{each}.router_replay.record_file=null" for each in ("actor", "ref")),
        f"{actor}.router_replay.mode=disabled",
        "actor_rollout_ref.ref.router_replay.mode=disabled",
        "+actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2",
    ]
    text = " ".join(text_of("verl_dapo.yaml", *said).replace("#", "").split())
    assert all(each.lstrip("+").partition("=")[0] in text for each in said)
    assert f"{actor}.router_replay.mode='R3' is not supported" in refused(
        "verl_dapo.yaml", f"{actor}.router_replay.mode=R3"
    )


def test_a_clip_ratio_that_verl_ignores_is_said():
    text = text_of("verl_gsm8k.sh", "actor_rollout_ref.actor.clip_ratio=0.1")
    assert "clip_ratio=0.1 has no effect in verl" in text


def test_the_command_prints_or_writes_a_run_file_and_never_over_another(tmp_path):
    def call(*words: str) -> Any:
        return CliRunner().invoke(app, ["import-config", *words])

    file, out = str(CONFIGS / "trl_gsm8k.yaml"), tmp_path / "run.yaml"
    printed = call("trl", file, "--set", "seed=3")
    assert printed.exit_code == 0 and "\nseed: 3\n" in printed.stdout
    assert call("trl", file, str(out)).exit_code == 0 and "\nseed: 7\n" in out.read_text()
    again = call("trl", file, str(out))
    assert again.exit_code != 0 and "exists already" in again.output
    unknown = call("skyrl", file)
    assert unknown.exit_code == 2 and "choose trl or verl" in unknown.output

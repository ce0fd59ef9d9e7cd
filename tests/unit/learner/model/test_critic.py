"""Values as advantages read them."""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from learner.model.critic import Critic, Networks, rescale_head
from learner.model.head import Head
from learner.model.packing import lay_out
from learner.model.policy import PolicyModel, token_row

BATCH = lay_out([token_row([1], [2])], [0], layout="padded", width=1)


def _policy() -> PolicyModel:
    config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    return PolicyModel(LlamaForCausalLM(config), head=Head(), layout="padded")


def test_a_value_of_a_bfloat16_model_is_not_rounded_to_bfloat16():
    critic = Critic(_policy().bfloat16(), backbone=None)
    nn.init.ones_(critic.value_head.weight)
    # Between 8 and 16 a bfloat16 has steps of 1/16.
    hidden_CH = torch.tensor([[8.0, 1 / 64, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]], dtype=torch.bfloat16)
    assert critic(BATCH, policy_hidden_CH=hidden_CH).tolist() == [8.015625]


def test_values_are_multiplied_before_they_are_shifted():
    head = nn.Linear(1, 1)
    nn.init.constant_(head.weight, 2.0)
    nn.init.constant_(head.bias, 3.0)
    rescale_head({f"critic.value_head.{name}": each for name, each in head.named_parameters()}, factor=10.0, shift=1.0)
    assert head(torch.ones(1)).tolist() == [51.0]


def test_a_pass_keeps_activations_of_trained_parts_alone():
    policy = _policy()
    networks = Networks(policy, Critic(policy, backbone=None))

    def have_gradients(**options: bool) -> tuple[bool, bool]:
        outputs, values_C = networks(BATCH, **options)
        return outputs.logprobs_C.requires_grad, values_C.requires_grad

    assert have_gradients() == (True, True) and have_gradients(trains_policy=False) == (False, True)
    with torch.no_grad():
        assert have_gradients() == (False, False)

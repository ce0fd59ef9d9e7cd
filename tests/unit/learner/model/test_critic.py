"""Values as advantages read them."""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from learner.model.critic import Critic
from learner.model.head import Head
from learner.model.packing import lay_out
from learner.model.policy import PolicyModel, token_row


def test_a_value_of_a_bfloat16_model_is_not_rounded_to_bfloat16():
    config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    policy = PolicyModel(LlamaForCausalLM(config).bfloat16(), head=Head(), layout="padded")
    critic = Critic(policy, backbone=None)
    nn.init.ones_(critic.value_head.weight)
    # Between 8 and 16 a bfloat16 has steps of 1/16.
    hidden_CH = torch.tensor([[8.0, 1 / 64, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]], dtype=torch.bfloat16)
    batch = lay_out([token_row([1], [2])], [0], layout="padded", width=1)
    assert critic(batch, policy_hidden_CH=hidden_CH).tolist() == [8.015625]

"""Scores are those of transformers' own forward on each text alone, whatever is computed together."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    DebertaV2Config,
    ModernBertConfig,
    Phi3Config,
    Phi3ForSequenceClassification,
    RobertaConfig,
)

from cluster.contracts.errors import ConfigError
from cluster.contracts.reward_config import RewardModelConfig
from learner.model.sequence_classification import SequenceClassifier
from tests.models import make_tiny_model, make_tiny_reward_model, make_tokenizer
from tests.unit.learner.model.test_policy import SIZES

EOS, PAD = 1, 2
TEXTS = [[0, 5, 6, 7, EOS], [0, 9, EOS, PAD, EOS], [0, *range(10, 40), PAD], [8]]
"""One ends with the end token, one with padding tokens of its own, one is a single token."""
TINY = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
ENCODERS = {
    "bert": BertConfig(**TINY, pad_token_id=PAD),
    "deberta": DebertaV2Config(**TINY, pad_token_id=PAD, pooler_hidden_size=32, relative_attention=True),
    "modernbert": ModernBertConfig(**TINY, pad_token_id=PAD, classifier_pooling="mean", global_attn_every_n_layers=2),
    "roberta": RobertaConfig(**TINY, pad_token_id=PAD),
}


def classifier(folder, **settings) -> SequenceClassifier:
    config = RewardModelConfig.model_validate({"path": str(folder), "dtype": "float32", **settings})
    return SequenceClassifier(config, field="reward.models.helpful")


def make_encoder(folder, config):
    torch.manual_seed(1)
    config.num_labels = 2
    config.initializer_range = 0.2
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@torch.no_grad()
def alone(folder, texts=TEXTS, **changed) -> torch.Tensor:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, **changed).eval()
    return torch.stack([model(input_ids=torch.tensor([text])).logits[0] for text in texts])


@pytest.mark.parametrize("pad_is_eos", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_a_causal_models_score_is_that_of_the_last_token_even_where_that_one_is_padding(
    tmp_path, architecture, pad_is_eos
):
    folder = make_tiny_reward_model(tmp_path / "m", architecture=architecture, pad_is_eos=pad_is_eos)
    # Without a padding token transformers reads the last token of a single text; with one it reads another.
    expected = alone(folder, pad_token_id=None)
    for max_tokens in (1, 40, 16384):
        found = torch.tensor(classifier(folder, max_tokens_per_micro_batch=max_tokens).score(TEXTS))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(alone(folder), expected, atol=0.01), "the numbers would not show the difference"


def test_a_text_that_memory_does_not_suffice_for_has_its_reason_and_the_others_their_scores(tmp_path, monkeypatch):
    folder = make_tiny_reward_model(tmp_path / "m")
    model = classifier(folder)
    logits = model._logits

    def small(batch):
        if batch.input_ids.numel() > 20:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return logits(batch)

    monkeypatch.setattr(model, "_logits", small)
    *scores, reason, last = model.score(TEXTS)
    assert reason == "32 tokens: CUDA out of memory."
    expected = alone(folder, texts=[*TEXTS[:2], TEXTS[3]], pad_token_id=None)
    torch.testing.assert_close(torch.tensor([*scores, last]), expected, rtol=1e-5, atol=1e-5)


def test_a_text_of_a_longrope_model_is_not_scored_by_the_longest_text_of_its_pass(tmp_path):
    """transformers rotates a pass of more than 16 tokens, here, by other frequencies."""
    torch.manual_seed(0)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0, 4.0, 8.0, 16.0],
    }
    positions = {"original_max_position_embeddings": 16, "max_position_embeddings": 64}
    config = Phi3Config(**SIZES, **positions, rope_parameters=rope, num_labels=1, bos_token_id=1, eos_token_id=2)
    Phi3ForSequenceClassification(config).save_pretrained(tmp_path)
    texts = [list(range(5, 21)), list(range(30, 70)), list(range(8, 12)), list(range(40, 57))]
    found = torch.tensor(classifier(tmp_path).score(texts))
    torch.testing.assert_close(found, alone(tmp_path, texts), rtol=1e-5, atol=1e-5)


def test_padding_on_the_left_gives_the_same_scores(tmp_path):
    folder = make_tiny_reward_model(tmp_path / "m")
    model = AutoModelForSequenceClassification.from_pretrained(folder, pad_token_id=None, dtype=torch.float32).eval()
    width = max(map(len, TEXTS))
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in TEXTS])
    ids = torch.tensor([[PAD] * (width - len(text)) + text for text in TEXTS])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids, attention_mask=mask, position_ids=positions).last_hidden_state
        expected = model.score(hidden[:, -1])
    torch.testing.assert_close(torch.tensor(classifier(folder).score(TEXTS)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ENCODERS)
def test_a_bidirectional_model_does_not_see_the_padding(tmp_path, name):
    folder = make_encoder(tmp_path / "m", ENCODERS[name])
    texts = [[token for token in text if token != PAD] for text in TEXTS]
    found = torch.tensor(classifier(folder).score(texts))
    torch.testing.assert_close(found, alone(folder, texts), rtol=1e-5, atol=1e-5)


def test_in_bfloat16_the_head_computes_in_float32_with_its_weights_as_stored(tmp_path):
    folder = make_tiny_reward_model(tmp_path / "m")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    # A small difference of large weights, which bfloat16 does not have: 256.25 is 256 there.
    tensors["score.weight"] = torch.full_like(tensors["score.weight"], 256.25)
    save_file(tensors, file, metadata={"format": "pt"})
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        hidden = model.base_model(input_ids=torch.tensor([TEXTS[0]])).last_hidden_state[0, -1].float()
    assert classifier(folder, dtype="bfloat16").score(TEXTS[:1])[0] == pytest.approx(
        [float(hidden.sum() * 256.25)], rel=1e-4, abs=1e-2
    )


def test_a_model_without_a_head_or_that_cannot_tell_padding_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"reward.models.helpful.path=.* lacks weights of a Qwen3ForSequenceClassification: score"
    ):
        classifier(make_tiny_model(tmp_path / "m"))
    unpadded = BertConfig(**TINY, pad_token_id=None)
    with pytest.raises(ConfigError, match="no pad_token_id, which it needs"):
        classifier(make_encoder(tmp_path / "e", unpadded))

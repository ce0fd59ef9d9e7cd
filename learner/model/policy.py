"""The learner's policy: a transformers causal model that computes log-probs without the logits of a whole batch.

`PolicyModel(micro_batch)` returns log-probs of the sampled tokens at the run's temperature and truncation. At load, a few tokens prove that
its head and its packing compute what the model's own forward computes. A layout without that proof is not used.

Shapes: B, L input rows; C completion positions; H hidden size; V vocabulary.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pickle import UnpicklingError
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cluster.contracts.algorithm_config import ValueConfig
from cluster.contracts.config import ModelConfig, ReferenceConfig, SamplingConfig
from cluster.contracts.errors import ConfigError, headline
from cluster.freed_memory import keep_freed_memory
from cluster.weights.model_files import refuse_unpinned_code
from learner.model.attention import FLASH, PACKED, widened, windows_seen
from learner.model.compute_type import never_round_to_tf32
from learner.model.frozen import built_empty, frozen, keep_float32, make_buffers
from learner.model.head import Head, selected_logprobs
from learner.model.linear import multiply_fast
from learner.model.packing import Layout, MicroBatch, TokenRow, lay_out, plan
from learner.model.routing import Routing
from learner.shape import read_config, windows

PROOF_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Nats, largest difference of a log-prob. bfloat16 rounds differently in other shapes; attending to another sequence differs far more."""
ISOLATION_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Nats: largest change of a log-prob when the other sequences of the row are replaced by others of the same lengths."""
ModelKind = type[AutoModelForCausalLM] | type[AutoModel] | type[AutoModelForSequenceClassification]
"""A whole causal model, its backbone alone, or a reward model."""
_MODEL_ERRORS = (TypeError, AttributeError, LookupError, ValueError, RuntimeError)
"""Errors of a model's own code that does not support packed rows."""
CRITIC_PATH = "algorithm.value.path"
"""The field's name, for error messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutputs:
    """Results of one forward pass, at completion positions with loss."""

    logprobs_C: Tensor
    entropies_C: Tensor | None
    partition_CP: Tensor | None
    """Log-probs of the micro-batch's candidates, then of all other tokens together; None without candidates."""
    hidden_CH: Tensor
    """Last hidden states that predict the tokens, which a shared critic reads. If a pass is split, those of this rank's slice."""


class PolicyModel(nn.Module):
    """Backbone and vocabulary head in one module, so that sharding gathers the head's weight like any other."""

    def __init__(
        self, causal_lm: PreTrainedModel, *, head: Head, layout: Layout, routing: Routing | None = None
    ) -> None:
        """With `routing`, passes compute with the experts recorded for their rows."""
        super().__init__()
        self.causal_lm = causal_lm
        self.head = head
        self.layout: Layout = layout
        self.routing = routing

    def forward(self, batch: MicroBatch, *, entropies: bool = False) -> TokenOutputs:
        if self.routing is not None:
            self.routing.follow(batch.routes)
        hidden_CH = hidden_states(self.causal_lm, batch)
        output = output_layer(self.causal_lm)
        selected = selected_logprobs(
            hidden_CH,
            output.weight,
            batch.targets_C,
            head=self.head,
            bias_V=output.bias,
            entropies=entropies,
            candidates_CK=batch.candidates_CK,
        )
        return TokenOutputs(**selected._asdict(), hidden_CH=hidden_CH)

    @contextmanager
    def full_softmax(self, *, temperature: float) -> Iterator[None]:
        """Inside the context, log-probs are over all tokens at `temperature`, whatever the run's sampling is."""
        original = self.head
        self.head = dataclasses.replace(original, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
        try:
            yield
        finally:
            self.head = original

    def own_logits(self, token_ids_L: Tensor) -> Tensor:
        """Logits of one sequence by the model's own forward, [L, V], against which `forward` is proven. The head multiplies in float32,
        since bfloat16 logits between 16 and 32 are 1/8 apart."""
        if self.routing is not None:
            self.routing.follow(None)
        hook = output_layer(self.causal_lm).register_forward_hook(_in_float32)
        try:
            return self.causal_lm(input_ids=token_ids_L[None], use_cache=False).logits[0]
        finally:
            hook.remove()


@torch.no_grad()
def score(
    compute: Callable[[MicroBatch], Tensor],
    rows: Sequence[TokenRow],
    *,
    layout: Layout,
    max_tokens: int,
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    """The results of `compute`, [C, ...] per pass, as one CPU tensor per row, [completion, ...], 0 where the loss mask is false."""
    if not rows:
        return []
    width = max(len(row.completion) for row in rows)
    results: list[Tensor] = [torch.empty(0)] * len(rows)
    for chosen in plan(rows, max_tokens=max_tokens, layout=layout)[0]:
        batch = lay_out(rows, chosen, layout=layout, width=width, device=device)
        computed = batch.scatter(compute(batch)).cpu()
        for place, index in enumerate(chosen):
            results[index] = computed[place, : len(rows[index].completion)]
    return results


def token_row(prompt: Sequence[int], completion: Sequence[int]) -> TokenRow:
    """A row whose whole completion counts."""
    return TokenRow(
        prompt=np.asarray(prompt, dtype=np.int64),
        completion=np.asarray(completion, dtype=np.int64),
        loss_mask=np.ones(len(completion), dtype=np.bool_),
    )


def hidden_states(causal_lm: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Last hidden states at the micro-batch's completion positions, [C, H]."""
    packed = {} if batch.segments is None else {"segments": batch.segments}
    backbone = causal_lm.base_model
    output = backbone(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **packed)
    hidden_BLH: Tensor = output[0]
    # An embedding look-up is a gather with a fast backward for indices that repeat: shared prompts.
    return F.embedding(batch.head_index_C, widened(hidden_BLH.flatten(0, 1))).to(hidden_BLH.dtype)


def output_layer(causal_lm: PreTrainedModel) -> nn.Linear:
    """The vocabulary head's layer. Raises ConfigError for another layer than a plain linear one: with LoRA, the weight that log-probs are
    computed from would not be the one that trains."""
    layer = causal_lm.get_output_embeddings()
    if layer is None or not isinstance(layer, nn.Linear):
        raise ConfigError(
            f"the vocabulary head is a {type(layer).__name__}, not a plain linear layer; leave it out of learner.lora.target_modules"
        )
    return layer


def _in_float32(layer: nn.Linear, inputs: tuple[Tensor], _: Tensor) -> Tensor:
    """Computes the layer's output again in float32, for some of its rows at a time."""
    logits = torch.cat([inputs[0].float() @ rows.float().T for rows in layer.weight.split(8192)], -1)
    return logits if layer.bias is None else logits + layer.bias.float()


def elsewhere(model: ModelConfig, place: ReferenceConfig | ValueConfig, *, section: str) -> ModelConfig:
    """`model`, with path, revision and trust_remote_code of `place` if that has a path.

    Raises ConfigError for code from the hub that is not pinned to a commit. `section`: the section of `place` in the run file.
    """
    if place.path is None:
        return model
    own = {name: getattr(place, name) for name in ("path", "revision", "trust_remote_code")}
    chosen = model.model_copy(update=own)
    refuse_unpinned_code(chosen, section=section)
    return chosen


def load(
    model: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    kind: ModelKind = AutoModelForCausalLM,
    field: str = "model.path",
) -> PreTrainedModel:
    """The model in `dtype`, dropout off: the policy that learns must be the one that sampled.

    Raises ConfigError naming `field` for a model that does not load, or whose weights are missing, of another shape, or pickled with code.
    """
    transformers.utils.logging.disable_progress_bar()
    config = read_config(model, field=field)
    options = {"attn_implementation": attention_of(model, config), "trust_remote_code": model.trust_remote_code}
    try:
        empty = built_empty(kind, config, **options)
        names = frozen(empty)
        keep_float32(empty, names)
        loaded, found = cast(Any, kind).from_pretrained(
            model.path,
            revision=model.revision,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{field}={model.path!r} does not load: {headline(error)}") from error
    except UnpicklingError as error:
        raise ConfigError(
            f"{field}={model.path!r}: its pickled weights are damaged or contain code, and are not read; take safetensors files instead"
        ) from error
    # transformers initialises mismatched and missing weights at random.
    if found["mismatched_keys"]:
        name, stored, expected = min(found["mismatched_keys"])
        raise ConfigError(
            f"{field}={model.path!r} stores {name} in the shape {list(stored)}, and its config.json describes {list(expected)}; bring back "
            "the model's own config.json, or take another model"
        )
    if found["missing_keys"]:
        raise ConfigError(
            f"{field}={model.path!r} lacks weights of a {type(loaded).__name__}: {min(found['missing_keys'])}"
        )
    make_buffers(loaded, names)
    without_dropout(loaded)
    nn.Module.to(loaded, device)
    return loaded


def load_scorer(
    model: ModelConfig,
    *,
    gpus: float,
    num_threads: int,
    kind: ModelKind = AutoModelForCausalLM,
    field: str = "model.path",
) -> PreTrainedModel:
    """A model that never trains, in a process of its own, whose threads and memory it sets. Raises ConfigError as `load` does."""
    never_round_to_tf32()
    torch.set_num_threads(num_threads)
    device, dtype = "cuda" if gpus else "cpu", getattr(torch, model.dtype)
    loaded = load(model, dtype=dtype, device=device, kind=kind, field=field).eval().requires_grad_(False)
    multiply_fast(loaded)
    if not gpus:
        keep_freed_memory()
    return loaded


def load_backbone(critic: ModelConfig, *, device: torch.device | str = "cpu") -> PreTrainedModel:
    """The backbone that a critic starts from, of a causal model or a reward model, in float32. Raises ConfigError as `load` does."""
    return load(critic, dtype=torch.float32, device=device, kind=AutoModel, field=CRITIC_PATH)


def attention_of(model: ModelConfig, config: PretrainedConfig) -> str | None:
    """The attention implementation to load the model with; None: transformers' choice, which is sdpa if the model supports it.

    transformers' sdpa ignores a soft cap of attention scores, which engines apply. Raises ConfigError for `sdpa` with such a model.
    """
    cap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    if cap is not None and model.attention == "sdpa":
        raise ConfigError(
            f"model.attention='sdpa' computes attention without the soft cap of {cap:g} that the scores of {model.path!r} have; "
            "use model.attention=auto"
        )
    if model.attention == "auto":
        return None if cap is None else "eager"
    return model.attention


def without_dropout(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name, value in vars(part).items():
            # Layers with activation checkpointing are in train mode, where they would apply their own dropout.
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)


def fix_rotations(module: nn.Module, *, model: ModelConfig) -> None:
    """Makes LongRoPE use one of its two sets of frequencies for the whole run, chosen by the run's longest context as the engine does.
    transformers chooses for each pass by its longest sequence, so that the other sequences would depend on it."""
    for part in module.modules():
        if getattr(part, "rope_type", None) != "longrope":
            continue
        rotary = cast(Any, part)
        short: int = rotary.config.rope_parameters["original_max_position_embeddings"]
        if (model.max_context or rotary.config.max_position_embeddings) > short:
            device = rotary.inv_freq.device
            rotary.original_inv_freq, _ = ROPE_INIT_FUNCTIONS["longrope"](rotary.config, device, seq_len=short + 1)


def prove(
    causal_lm: PreTrainedModel,
    *,
    model: ModelConfig,
    packing: str,
    sampling: SamplingConfig,
    head_chunk_tokens: int | None,
) -> PolicyModel:
    """The policy in the fastest proven layout; see `choose_layout`."""
    fix_rotations(causal_lm, model=model)
    policy = unproven(causal_lm, sampling=sampling, head_chunk_tokens=head_chunk_tokens)
    dtype = next(causal_lm.parameters()).dtype
    choose_layout(policy, forward=policy, own_logits=policy.own_logits, model=model, packing=packing, dtype=dtype)
    return policy


def unproven(
    causal_lm: PreTrainedModel,
    *,
    sampling: SamplingConfig,
    head_chunk_tokens: int | None,
    kept_logits_bytes: int = 0,
    replays_routing: bool = False,
) -> PolicyModel:
    """The policy in the padded layout, with the head that the model's configuration describes.

    Raises ConfigError for a model without a backbone of its own, and, if it `replays_routing`, as `Routing` does.
    """
    if causal_lm.base_model is causal_lm:  # Llama 4, whose positions and chunks are not supported either
        raise ConfigError(
            f"model.path: a {type(causal_lm).__name__} has no backbone {causal_lm.base_model_prefix!r} of its own to be trained by; "
            "take another model"
        )
    head = Head(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        chunk_tokens=head_chunk_tokens,
        kept_bytes=kept_logits_bytes,
        **_head_parameters(causal_lm.config.get_text_config()),
    )
    routing = Routing(causal_lm) if replays_routing else None
    return PolicyModel(causal_lm, head=head, layout="padded", routing=routing)


def choose_layout(
    policy: PolicyModel,
    *,
    forward: Callable[[MicroBatch], TokenOutputs],
    own_logits: Callable[[Tensor], Tensor],
    model: ModelConfig,
    packing: str,
    dtype: torch.dtype,
    splits_sequences: bool = False,
) -> None:
    """Gives the policy the fastest layout that, on a few tokens, computes what the model's own forward computes (in `dtype`).

    `forward` and `own_logits` call the policy's methods, on several ranks through the module that gathers its shards; all ranks must call
    this. Raises ConfigError if even padded rows differ (the head is applied in an unknown way), if packing is required, by the setting or
    because ranks split sequences, but does not keep sequences apart, and if flash attention leaves out the model's window.
    """
    causal_lm, device = policy.causal_lm, policy.causal_lm.device
    vocabulary_size = output_layer(causal_lm).weight.shape[0]
    rows = _proof_rows(vocabulary_size, shift=0)
    own_attention = causal_lm.config._attn_implementation or "eager"
    with windows_seen(FLASH) as seen:
        expected = [_own_logprobs(own_logits, row, device=device) for row in rows]
    if model.attention == FLASH and (left_out := _shorter_windows(causal_lm, model=model) - seen):
        raise ConfigError(
            f"model.attention={FLASH!r} takes no masks, and {type(causal_lm).__name__} has its window of {min(left_out)} tokens in masks "
            "alone; use model.attention=auto"
        )
    why = ""
    for layout in _layouts("packed" if splits_sequences else packing, attention=model.attention):
        causal_lm.set_attn_implementation(
            PACKED if layout != "padded" and model.attention in ("auto", "sdpa") else own_attention
        )
        policy.layout = layout
        why = _difference(policy, rows, expected, forward=forward, model=model, dtype=dtype)
        if why is None:
            return
    name = type(causal_lm).__name__
    if splits_sequences:
        raise ConfigError(
            f"learner.sequence_parallel_size: {name} sees other positions outside of the attention that ranks split ({why}); leave it out "
            "for this model"
        )
    if packing == "packed":
        raise ConfigError(f"learner.packing=packed: {name} does not keep packed sequences apart ({why}); use auto")
    raise ConfigError(f"{name} applies its vocabulary head in an unsupported way ({why}); take another model")


def _difference(
    policy: PolicyModel,
    rows: Sequence[TokenRow],
    expected: Sequence[Tensor],
    *,
    forward: Callable[[MicroBatch], TokenOutputs],
    model: ModelConfig,
    dtype: torch.dtype,
) -> str | None:
    """Why the policy's layout is not proven: log-probs differ from the expected ones, or, in a packed layout, depend on other sequences,
    the model's code raises, or attention is not told the model's windows. None if it is proven."""
    causal_lm, layout = policy.causal_lm, policy.layout

    def scored(rows: Sequence[TokenRow]) -> list[Tensor]:
        device = causal_lm.device
        return score(lambda b: forward(b).logprobs_C, rows, layout=layout, max_tokens=10**6, device=device)

    # A temperature would divide both sides alike and magnify rounding.
    with policy.full_softmax(temperature=1.0):
        if layout == "padded":
            return _told(_distance(scored(rows), expected), dtype)
        others = _proof_rows(output_layer(causal_lm).weight.shape[0], shift=5)
        try:
            with windows_seen(PACKED) as seen:
                found = scored(rows)
                first, last = scored([rows[0], *others[1:]])[:1], scored([*others[:-1], rows[-1]])[-1:]
        except _MODEL_ERRORS as error:
            # For example, it reads the mask, which packed rows do not have.
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raised = f"{type(error).__name__}: {headline(error)}"
            if not any(isinstance(parameter, DTensor) for parameter in causal_lm.parameters()):
                return f"its own code raises {raised}"
            # Ranks that gather shards cannot continue after an error. A RuntimeError may come from their connection.
            if isinstance(error, RuntimeError):
                raise
            raise ConfigError(
                f"learner.packing: the code of {type(causal_lm).__name__} does not take packed rows ({raised}); use learner.packing=padded"
            ) from error
    # Packed attention ignores masks, and these rows are too short to show a window.
    if seen and (hidden := _shorter_windows(causal_lm, model=model) - seen):
        return f"its window of {min(hidden)} tokens is in masks alone"
    # Causal layers leak only forward: the last sequence has all others before it.
    leak = _distance([*first, *last], [found[0], found[-1]])
    if not leak <= ISOLATION_TOLERANCE.get(dtype, 1e-4):  # NaN is neither less nor more
        return f"others in the row move a sequence by {leak:.3g} nats"
    return _told(_distance(found, expected), dtype)


def _told(error: float, dtype: torch.dtype) -> str | None:
    return None if error <= PROOF_TOLERANCE.get(dtype, 1e-3) else f"off by {error:.3g} nats"


def _distance(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    return float(torch.stack([(a - b).abs().max() for a, b in zip(first, second, strict=True)]).max())


def _shorter_windows(causal_lm: PreTrainedModel, *, model: ModelConfig) -> set[int]:
    """Windows of the model's layers that are shorter than its longest sequence."""
    text = causal_lm.config.get_text_config()
    longest = model.max_context or getattr(text, "max_position_embeddings", None) or sys.maxsize
    return {window for window in windows(text) if window < longest}


def _layouts(packing: str, *, attention: str) -> tuple[Layout, ...]:
    packed: tuple[Layout, ...] = ("packed",) if attention == FLASH else ("shared", "packed")
    if packing == "padded" or (packing == "auto" and attention == "eager"):
        return ("padded",)
    return packed if packing == "packed" else (*packed, "padded")


def _head_parameters(config: Any) -> dict[str, float]:
    """Scale and soft cap of the logits, by the names that model families use in their configurations. The proof catches others."""
    found: dict[str, float] = {}
    if getattr(config, "final_logit_softcapping", None) is not None:
        found["soft_cap"] = float(config.final_logit_softcapping)
    if getattr(config, "logit_scale", None) is not None:
        found["scale"] = float(config.logit_scale)
    if getattr(config, "logits_scaling", None) is not None:
        found["scale"] = 1.0 / float(config.logits_scaling)
    return found


def _proof_rows(vocabulary_size: int, *, shift: int) -> list[TokenRow]:
    """Three rows, two with the same prompt; `shift` changes tokens, not lengths."""
    ids = [(7 * i + 3 + shift * (i + 1)) % vocabulary_size for i in range(24)]
    rows = [(ids[:5], ids[5:9]), (ids[:5], ids[9:12]), (ids[12:18], ids[18:23])]
    return [token_row(prompt, completion) for prompt, completion in rows]


@torch.no_grad()
def _own_logprobs(own_logits: Callable[[Tensor], Tensor], row: TokenRow, *, device: torch.device) -> Tensor:
    """Log-probs of the row alone, by the model's own forward."""
    ids = torch.from_numpy(np.concatenate([row.prompt, row.completion])).to(device)
    logprobs_LV = own_logits(ids).float().log_softmax(-1)[len(row.prompt) - 1 : -1]
    return logprobs_LV.gather(1, ids[len(row.prompt) :, None])[:, 0].cpu()

"""Additions to vLLM for engines on CPUs: a faster end of the sampler, adapters without a part for the head, and the chosen experts of a
mixture of experts.

The sampler draws each row's token and gathers its log-prob, and computes nothing that no one reads. vLLM's own draws a number for each
token of the vocabulary, asks each request's generator at each step, and counts the tokens that are likelier than the drawn one: of a model
with 262k tokens, a fifth of a step.

vLLM adds each request's adapter to its logits, although the learner makes no adapter for the vocabulary head. It would add zeros, slowly,
and it fails where the logits' rows are not one for each request: the log-probs of a prompt, read in the same step.

vLLM records experts and returns them with the requests (`aux_output_connector`). Only its newer model runner calls the recorder, and that
one needs Triton, which CPUs lack. `ExpertRecordingWorker`, an argument of the engine (`worker_cls`), makes the same calls around the
older runner, so the experts arrive in the same way on CPUs and GPUs.
"""

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor
from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector, get_aux_output_connector
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.cpu_worker import CPUWorker

from actors.rollout.drawing import Uniforms, token_at
from cluster.freed_memory import keep_freed_memory
from cluster.weights.vllm_receiver import ReceiverRegistration


class CpuExtension(ReceiverRegistration):
    """vLLM mixes this into its worker class on CPUs."""

    def speed_up(self) -> None:
        """Call it once the model is loaded, in an engine with `processed_logprobs`. Truncation and all before it stay vLLM's."""
        keep_freed_memory()
        sampler = self.model_runner.sampler
        sampler.topk_topp_sampler.forward = partial(draw, Uniforms())
        sampler.gather_logprobs = gather_logprobs
        for module in self.model_runner.get_model().modules():
            if isinstance(module, LogitsProcessorWithLoRA):
                module.punica_wrapper.add_lora_logits = add_nothing


def draw(
    uniforms: Uniforms, logits: Tensor, generators: Mapping[int, Generator], k: Tensor | None, p: Tensor | None
) -> tuple[Tensor, Tensor]:
    """In place of vLLM's `TopKTopPSampler`: tokens [rows], and the log-probs [rows, vocabulary] by which they are drawn. `generators` by
    row."""
    logits = apply_top_k_top_p(logits, k, p)
    # Not exp of the log-probs, which alone takes longer on some processors.
    probs = logits.softmax(dim=-1, dtype=torch.float32)
    tokens = token_at(uniforms.of(generators, num_rows=len(logits)), probs)
    return tokens, logits.log_softmax(dim=-1, dtype=torch.float32)


def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
    """As vLLM's. Where the tokens' own log-probs alone are asked for, ranks are 0: counting would read all log-probs again."""
    if num_logprobs:
        return Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)
    chosen = token_ids[:, None]
    return LogprobsTensors(chosen.to(torch.int32), logprobs.gather(-1, chosen), torch.zeros_like(token_ids))


def add_nothing(*_: Any, **__: Any) -> None:
    """In place of vLLM's `add_lora_logits`."""


class ExpertRecordingWorker(CPUWorker, CpuExtension):
    """Worker of an engine that returns routed experts, without speculative decoding.

    It inherits the extension for weights itself: vLLM mixes that into the class of its first engine in a process, and then refuses a
    subclass.
    """

    _connector: AuxOutputWorkerConnector
    _scheduled: Any

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        model: Any = self.model_runner.get_model()
        self._connector = get_aux_output_connector(model, self.vllm_config, kv_cache_config)

    def execute_model(self, scheduler_output: Any) -> Any:
        self._connector.begin_step(scheduler_output.aux_output_connector_metadata)
        self._scheduled = scheduler_output
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        output: Any = super().sample_tokens(grammar_output)
        pending = self._connector.prepare_output(self._computed(output.req_ids)) if output.req_ids else None
        if pending is not None:
            # A prompt that is not read to its end yet samples no token.
            num_sampled = np.array([len(token_ids) for token_ids in output.sampled_token_ids])
            pending.enqueue_cpu_copy(num_sampled, np.zeros_like(num_sampled))
            output.aux_output_connector_output = pending.process_output()
        return output

    def _computed(self, request_ids: list[str]) -> Any:
        """The step's computed tokens of each request, in the order of the rows, with the fields of the newer runner's `InputBatch`."""
        step, cached = self._scheduled, self._scheduled.scheduled_cached_reqs
        starts = {request.req_id: request.num_computed_tokens for request in step.scheduled_new_reqs}
        starts |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        return SimpleNamespace(
            req_ids=request_ids,
            query_start_loc_np=np.cumsum([0, *(step.num_scheduled_tokens[each] for each in request_ids)]),
            num_computed_tokens_np=np.array([starts[each] for each in request_ids]),
        )

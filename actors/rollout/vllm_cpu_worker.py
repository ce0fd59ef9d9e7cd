"""vLLM's worker for CPUs that also returns the chosen experts of a mixture of experts, as its workers for GPUs do.

vLLM records experts and returns them with the requests (`aux_output_connector`). Only its newer model runner calls the recorder, and that
one needs Triton, which CPUs lack. This worker, an argument of the engine (`worker_cls`), makes the same calls around the older runner, so
the experts arrive in the same way on CPUs and GPUs.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector, get_aux_output_connector
from vllm.v1.worker.cpu_worker import CPUWorker

from cluster.weights.vllm_receiver import ReceiverRegistration


class ExpertRecordingWorker(CPUWorker, ReceiverRegistration):
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

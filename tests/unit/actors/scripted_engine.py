"""An engine that samples by rule: one token a step and request, with log-prob minus the weights' first number."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cluster.contracts.protocols import EngineOutput, EngineRequest
from cluster.contracts.types import EngineUse, FinishReason


class ScriptedEngine:
    """Token i of a request is `seed % 100 + i`; `weight` shows in every log-prob, so that tests see which weights sampled."""

    def __init__(
        self,
        *,
        at_step: dict[int, Callable[[], object]] | None = None,
        length: Callable[[EngineRequest], int] = lambda request: request.sampling.max_tokens,
        refusal: Callable[[EngineRequest], str | None] = lambda request: None,
        records_experts: bool = False,
    ) -> None:
        """`length` says how many tokens a request gets, `refusal` why it gets none. With `records_experts` a finished request tells of
        each position how long its request was when it read it: the experts of a model with one layer and one expert a token."""
        self._length = length
        self._refusal = refusal
        self.weight = 0.0
        self.ignores_loads = False
        self.compositions: list[list[str]] = []
        """The request ids of each step."""
        self.added: list[EngineRequest] = []
        self.at_step = at_step or {}
        """What else happens in the engine's thread during a step, by how many tokens each request had before it."""
        self._records_experts = records_experts
        self._running: dict[str, tuple[EngineRequest, int]] = {}
        self._held: list[EngineOutput] = []

    def add(self, request: EngineRequest) -> None:
        self.added.append(request)
        kept = len(request.kept.token_ids) if request.kept else 0
        self._running[request.request_id] = (request, kept)

    def step(self) -> list[EngineOutput]:
        held, self._held = self._held, []
        return held or self._advance()

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._running.pop(request_id, None)
        self._held = [output for output in self._held if output.request_id not in request_ids]

    def use(self) -> EngineUse:
        return EngineUse(num_running=len(self._running), cache_share=len(self._running) / 100)

    def load(self, tensors: Iterator[tuple[str, Any]]) -> None:
        for _, tensor in tensors:
            if not self.ignores_loads:
                self.weight = float(tensor.flatten()[0])

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        self._held += self._advance()
        return [-self.weight] * (len(token_ids) - 1)

    def _advance(self) -> list[EngineOutput]:
        progress = max((num_done for _, num_done in self._running.values()), default=-1)
        self.at_step.pop(progress, lambda: None)()
        self.compositions.append(list(self._running))
        outputs: list[EngineOutput] = []
        for request_id, (request, num_done) in list(self._running.items()):
            if reason := self._refusal(request):
                outputs.append(
                    EngineOutput(request_id=request_id, token_ids=[], logprobs=[], finish_reason=None, refusal=reason)
                )
                del self._running[request_id]
                continue
            is_last = num_done + 1 == self._length(request)
            outputs.append(
                EngineOutput(
                    request_id=request_id,
                    token_ids=[request.seed % 100 + num_done],
                    logprobs=[-self.weight],
                    finish_reason=FinishReason.LENGTH if is_last else None,
                    routed_experts=self._experts(request, num_done) if is_last else None,
                )
            )
            self._running[request_id] = (request, num_done + 1)
            if is_last:
                del self._running[request_id]
        return outputs

    def _experts(self, request: EngineRequest, num_done: int) -> bytes | None:
        length = len(request.prompt_token_ids) + num_done
        return bytes([length % 256] * length) if self._records_experts else None

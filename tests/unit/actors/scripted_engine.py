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
        told_together: int = 1,
    ) -> None:
        """`length` says how many tokens a request gets, `refusal` why it gets none. With `records_experts` a finished request tells of
        each position how long its request was when it read it: the experts of a model with one layer and one expert a token. Tokens of a
        request are kept back until there are as many as `told_together`."""
        self._length = length
        self._refusal = refusal
        self.weight = 0.0
        self.ignores_loads = False
        self.compositions: list[list[str]] = []
        """The request ids of each step."""
        self.added: list[EngineRequest] = []
        self.is_asleep = False
        self.at_step = at_step or {}
        """What else happens in the engine's thread during a step, by how many tokens each request had before it."""
        self._records_experts = records_experts
        self._told_together = told_together
        self._kept_back: dict[str, list[tuple[int, float]]] = {}
        self._running: dict[str, tuple[EngineRequest, int]] = {}
        self._held: list[EngineOutput] = []

    def sleep(self, *, keeps_weights: bool) -> None:
        assert not self._running and not self._held, "no request runs in an engine that sleeps"
        self.is_asleep = True
        if not keeps_weights:
            self.weight = float("nan")

    def wake(self) -> None:
        self.is_asleep = False

    def add(self, request: EngineRequest) -> None:
        self.added.append(request)
        kept = len(request.kept.token_ids) if request.kept else 0
        self._running[request.request_id] = (request, kept)

    def step(self) -> list[EngineOutput]:
        held, self._held = self._held, []
        return held or self._advance()

    def flush(self) -> list[EngineOutput]:
        held, self._held = self._held, []
        return held + [self._told(request_id, None) for request_id, tokens in self._kept_back.items() if tokens]

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._running.pop(request_id, None)
            self._kept_back.pop(request_id, None)
        self._held = [output for output in self._held if output.request_id not in request_ids]

    def use(self) -> EngineUse:
        return EngineUse(num_running=len(self._running), cache_share=len(self._running) / 100)

    def load(self, tensors: Iterator[tuple[str, Any]]) -> None:
        self.wake()
        for _, tensor in tensors:
            if not self.ignores_loads:
                self.weight = float(tensor.flatten()[0])

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        self._held += self._advance()
        return [-self.weight] * (len(token_ids) - 1)

    def _advance(self) -> list[EngineOutput]:
        assert not self.is_asleep, "an engine that sleeps computes nothing"
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
            kept_back = self._kept_back.setdefault(request_id, [])
            kept_back.append((request.seed % 100 + num_done, -self.weight))
            if is_last:
                experts = self._experts(request, num_done)
                outputs.append(self._told(request_id, FinishReason.LENGTH, routed_experts=experts))
            elif len(kept_back) == self._told_together:
                outputs.append(self._told(request_id, None))
            self._running[request_id] = (request, num_done + 1)
            if is_last:
                del self._running[request_id]
        return outputs

    def _told(
        self, request_id: str, reason: FinishReason | None, *, routed_experts: bytes | None = None
    ) -> EngineOutput:
        tokens, self._kept_back[request_id] = self._kept_back[request_id], []
        return EngineOutput(
            request_id=request_id,
            token_ids=[token for token, _ in tokens],
            logprobs=[logprob for _, logprob in tokens],
            finish_reason=reason,
            routed_experts=routed_experts,
        )

    def _experts(self, request: EngineRequest, num_done: int) -> bytes | None:
        length = len(request.prompt_token_ids) + num_done
        return bytes([length % 256] * length) if self._records_experts else None

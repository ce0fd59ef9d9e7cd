"""The tokens of a played episode, as a run would train them, by the model's tokenizer and chat template. No weights are loaded."""

from collections.abc import Sequence

from rich.text import Text

from actors.chat.calls import NamedParser
from actors.chat.formatter import ChatFormatter
from actors.chat.rendered_calls import render_turn
from actors.rollout.episodes.speech import Opening, Speech
from actors.rollout.episodes.transcript import Segment, Transcript
from cluster.contracts.config import ModelConfig
from cluster.contracts.episodes import Asked, Event, Said, ToolCall
from cluster.contracts.types import Completion, FinishReason, Prompt
from cluster.sinks.console.words import for_terminal
from deploy.playing import Game, call_of

_TRAINED, _WRITTEN = "bold black on green", "dim"
_ANY = Prompt(prompt_id="any", messages=[{"role": "user", "content": "?"}])
"""Any prompt: the template begins each turn of the model as this one."""
_BEGINS, _ENDS = "⟦", "⟧"
"""Around trained tokens, for screens without colours."""


def of_model(path: str, game: Game) -> "Tokens":
    """Raises ConfigError for a model that does not load or whose conversations are not exact, and for an unknown parser."""
    return Tokens(ChatFormatter.load(ModelConfig(path=path)), game)


class Tokens:
    """Encodes each line as if the model had sampled it. The environment gets the text and tool calls that are parsed from the tokens."""

    def __init__(self, formatter: ChatFormatter, game: Game) -> None:
        """Raises ConfigError for a model whose conversations are not exact, and for an unknown parser."""
        self._formatter = formatter
        self._turns = formatter.turns()
        parser = game.episodes.parser
        speech = Speech(formatter, parser=parser and NamedParser(parser))
        self._transcript = Transcript(Opening(game.prompt, speech), speech, game.episodes)

    def take(self, events: Sequence[Event]) -> None:
        self._transcript.take(events)

    def say(self, asked: Asked, line: str) -> Said:
        """As `Mouth.say`."""
        prompt = self._transcript.prompt_for(asked)
        sampled = self._sampled(asked, line, context=self._turns.encoder.decode(prompt.token_ids))
        completion = Completion(
            token_ids=sampled,
            rollout_logprobs=[0.0] * len(sampled),
            policy_versions=[0] * len(sampled),
            finish_reason=FinishReason.STOP,
        )
        return self._transcript.add(asked, prompt, completion)

    def shown(self) -> Text:
        """All rows, with trained tokens marked."""
        text = Text()
        for number, segment in enumerate(self._transcript.segments, start=1):
            whole, trained = len(segment.prompt_token_ids) + len(segment.token_ids), sum(segment.loss_mask)
            text.append(f"row {number}: {trained} of {whole} tokens are trained\n", style="bold")
            text.append_text(self._row(segment)).append("\n")
        return text

    def _row(self, segment: Segment) -> Text:
        prompt = "".join(self._formatter.shown(segment.prompt_token_ids))
        text = Text().append(for_terminal(prompt), style=_WRITTEN)
        was_trained = False
        for shown, is_trained in zip(self._formatter.shown(segment.token_ids), segment.loss_mask, strict=True):
            if is_trained != was_trained:
                text.append(_BEGINS if is_trained else _ENDS)
            text.append(for_terminal(shown), style=_TRAINED if is_trained else _WRITTEN)
            was_trained = is_trained
        return text.append(_ENDS) if was_trained else text

    def _sampled(self, asked: Asked, line: str, *, context: str) -> list[int]:
        call = call_of(line, asked.tools)
        if call is not None and isinstance(call.arguments, dict):
            line = self._written(call, asked)
        prompt = _ANY if asked.raw is None else Prompt(prompt_id="raw", text=context)
        return self._formatter.encode_completion(prompt, line) if line else [*self._formatter.stop_token_ids[:1]]

    def _written(self, call: ToolCall, asked: Asked) -> str:
        """The call in the template's format."""
        return render_turn(self._turns.template, [call], tools=asked.tools, stops=self._turns.stops).text

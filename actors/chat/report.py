"""Which parts of one model's conversations are exact, proved by rendering before anything is sampled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actors.chat.after_turn import ASKED
from actors.chat.rendered_calls import num_common
from actors.chat.rendering import ChatTemplate, Message
from actors.chat.round_trip import PROBE_TOOLS, ProvenParser, find_parser
from actors.chat.turns import Turns
from actors.reasoning import END_OF_THINK, THINK
from cluster.contracts.errors import ConfigError, DataError

_SAID, _THOUGHT, _RULE = "Zqsaid", "Zqthought", "Zqrule"
_TOLD: Message = {"role": "user", "content": "Zqtold"}
_TOOL = PROBE_TOOLS[0]["function"]["name"]
_AWKWARD = "plain, 1 < 2 [x] {y}\n\n  z"
"""Content whose ids must decode to the template's text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReport:
    """The capabilities of a model's chat template. A field `why_no_...` is None if the capability is there, else the reason."""

    generation_prompt: str
    """Text that begins the assistant's turn; empty if the template writes none."""
    turn_close: str
    """From the assistant's last word to the stop token that ends its turn, else to the next user's words."""
    stop_token: str | None
    """The model's stop token with which the template ends a turn; None if it writes none."""
    why_no_turns: str | None
    """Why a user's message after a turn cannot be written exactly."""
    why_no_tools: str | None
    """Why tools are not shown, calls are not written, or a tool's answer cannot be written exactly."""
    why_no_calls: str | None
    """Why calls cannot be read."""
    parser: ProvenParser | None
    """Reads calls; None if no parser can."""
    takes_several_answers: bool
    """Accepts several answers of tools, one after another."""
    takes_system: bool
    """Accepts a first message of role `system`."""
    rewrites: str | None
    """How the template would change earlier turns after a further message of the user; None: it does not."""
    cuts_cleanly: bool
    """Text can be encoded to continue after sampled tokens, without a space of its own."""
    unsplittable: tuple[str, ...]
    """Control tokens that a message's text must not contain."""

    @property
    def calls_are_read_by(self) -> str | None:
        """The parser's origin; None without a parser."""
        if self.parser is None:
            return None
        return "the tokenizer's response template" if self.parser.is_own else "a parser made from the chat template"

    @property
    def takes_several_calls(self) -> bool:
        """Several calls in one turn."""
        return self.parser is not None and self.parser.takes_several

    def require_turns(self) -> None:
        """Raises ConfigError unless a conversation can continue exactly after a turn."""
        if self.why_no_turns is not None:
            raise ConfigError(f"model.chat_template: {self.why_no_turns}")

    def require_tools(self, *, reads_calls: bool = False) -> None:
        """Raises ConfigError unless tools are shown, their answers are exact, and calls can be read. `reads_calls`: a named parser reads
        them."""
        self.require_turns()
        if self.why_no_tools is not None:
            raise ConfigError(f"model.chat_template: {self.why_no_tools}; set it to a template with tools, or use none")
        if self.why_no_calls is not None and not reads_calls:
            raise ConfigError(
                f"model.chat_template: {self.why_no_calls}; name a parser in episodes.parser, or use no tools"
            )


def chat_report(turns: Turns) -> ChatReport:
    """Raises DataError for a template that accepts no user's message."""
    template, stops = turns.template, turns.stops
    begins = _generation_prompt(turns)
    why_no_turns = _why_not(lambda: _prove_decodes(turns, [{"role": "user", "content": _AWKWARD}]))
    why_no_tools = _why_not(lambda: _prove_tools(turns))
    parser, why_no_calls = None, "tools are not supported" if why_no_tools else None
    if why_no_tools is None:
        try:
            parser = find_parser(template, own=turns.response_template, stops=stops, generation_prompt=begins)
        except DataError as error:
            why_no_calls = str(error)
    close = _turn_close(template)
    stop_token = min((stop for stop in stops if stop in close), key=close.index, default=None)
    return ChatReport(
        generation_prompt=begins,
        turn_close=close if stop_token is None else close[: close.index(stop_token) + len(stop_token)],
        stop_token=stop_token,
        why_no_turns=why_no_turns,
        why_no_tools=why_no_tools,
        why_no_calls=why_no_calls,
        parser=parser,
        takes_several_answers=why_no_tools is None
        and _why_not(lambda: turns.suffix(_answers(2), tools=PROBE_TOOLS)) is None,
        takes_system=_writes(template, [{"role": "system", "content": _RULE}, ASKED], _RULE),
        rewrites=_rewrites(template),
        cuts_cleanly=turns.encoder.cuts_cleanly,
        unsplittable=turns.encoder.unsplittable,
    )


def _prove_tools(turns: Turns) -> None:
    if _TOOL not in turns.template.prompt([ASKED], tools=PROBE_TOOLS):
        raise DataError("the chat template does not show tools to the model")
    _prove_decodes(turns, _answers(1))


def _prove_decodes(turns: Turns, messages: Sequence[Message]) -> None:
    suffix = turns.suffix(messages, tools=PROBE_TOOLS)
    # White space is not compared: some control tokens absorb the white space next to them.
    decoded = turns.encoder.decode(suffix.token_ids)
    if "".join(decoded.split()) != "".join(suffix.text.split()):
        raise DataError(
            f"the tokenizer makes {decoded!r} of {suffix.text!r}; take the tokenizer that belongs to the template"
        )


def _answers(number: int) -> list[Message]:
    return [
        {"role": "tool", "name": _TOOL, "tool_call_id": f"call{index:05}", "content": _AWKWARD}
        for index in range(number)
    ]


def _generation_prompt(turns: Turns) -> str:
    prompt = turns.template.prompt([ASKED])
    start = num_common(prompt, turns.template([ASKED]))
    # Without a generation prompt the template may write an eos there, and both may begin with the same characters of control tokens.
    begun = ((prompt.rfind(control, 0, start + len(control) - 1), len(control)) for control in turns.encoder.controls)
    return prompt[min((begin for begin, length in begun if 0 <= begin < start < begin + length), default=start) :]


def _turn_close(template: ChatTemplate) -> str:
    """The text from the assistant's last word to the next user's words."""
    try:
        text = template.prompt([ASKED, {"role": "assistant", "content": _SAID}, _TOLD])
    except DataError:
        return ""
    return text.rpartition(_SAID)[2].partition(str(_TOLD["content"]))[0]


def _rewrites(template: ChatTemplate) -> str | None:
    inline: Message = {"role": "assistant", "content": f"{THINK}\n{_THOUGHT}\n{END_OF_THINK}\n\n{_SAID}"}
    # gpt-oss's template has a name of its own for reasoning.
    apart: Message = {"role": "assistant", "content": _SAID, "reasoning_content": _THOUGHT, "thinking": _THOUGHT}
    is_dropped = _writes(template, [ASKED, apart], _THOUGHT) and not _writes(template, [ASKED, apart, _TOLD], _THOUGHT)
    if is_dropped or (
        _writes(template, [ASKED, inline, _TOLD], _SAID) and not _writes(template, [ASKED, inline, _TOLD], _THOUGHT)
    ):
        return "earlier reasoning is dropped"
    try:
        before = template.prompt([ASKED], tools=PROBE_TOOLS)
        after = template.prompt([ASKED, {"role": "assistant", "content": _SAID}, _TOLD], tools=PROBE_TOOLS)
    except DataError:
        return None
    head, _, tail = after.partition(_SAID)
    if _TOOL in before and (_TOOL not in head or _TOOL in tail):
        return "tools move to the last user's message"
    # Text before the words that is not in the prompt: the model samples it itself.
    return None if head.startswith(before) else "the beginning of a turn is written otherwise than it was prompted"


def _writes(template: ChatTemplate, messages: Sequence[Message], word: str) -> bool:
    try:
        return word in template(messages)
    except DataError:
        return False


def _why_not(attempt: Callable[[], object]) -> str | None:
    try:
        attempt()
    except DataError as error:
        return str(error)
    return None

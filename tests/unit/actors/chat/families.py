"""Look-alikes of the chat templates in the field, each with a tokenizer that has its control tokens."""

import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from actors.chat.report import ChatReport, chat_report
from actors.chat.turns import Turns

TEMPLATES = Path(__file__).parent / "templates"
_PROSE = "the user asks and the assistant says what the tool found in the end, with a name and a value " * 3


@dataclass(frozen=True, kw_only=True)
class Family:
    special: tuple[str, ...]
    """Control tokens; the first is the eos."""
    stops: tuple[str, ...]
    """What ends a turn for the model."""
    added: tuple[str, ...] = ()
    """Tokens that the tokenizer does not call special."""
    kind: Literal["bytes", "metaspace", "metaspace_always"] = "bytes"
    takes_space_after: bool = False
    """Control tokens take the white space after them in."""


_IM = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_QWEN = Family(special=_IM, stops=("<|im_end|>", "<|endoftext|>"), added=_TAGS)
_CHATML = Family(special=_IM, stops=("<|im_end|>",))
_LLAMA3 = Family(
    special=("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"),
    stops=("<|eot_id|>", "<|eom_id|>"),
)
_MISTRAL = ("</s>", "<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]")
_DEEPSEEK = (
    "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
)  # fmt: skip
_GLM = Family(
    special=("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    stops=("<|endoftext|>", "<|user|>", "<|observation|>"),
    added=_TAGS,
)
_GRANITE = Family(
    special=("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"), stops=("<|end_of_text|>",)
)
_COHERE = (
    "<|END_OF_TURN_TOKEN|>",
    "<BOS_TOKEN>",
    "<|START_OF_TURN_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
    "<|SYSTEM_TOKEN|>",
)
_GEMMA = ("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")
_PLAIN_S = ("</s>", "<s>")

FAMILIES: dict[str, Family] = {
    "chatml": _CHATML,
    "cohere": Family(special=_COHERE, stops=_COHERE[:1]),
    "deepseek": Family(special=_DEEPSEEK, stops=_DEEPSEEK[:1]),
    "deepseek_r1": Family(special=_DEEPSEEK[:4], stops=_DEEPSEEK[:1], added=_TAGS[:2]),
    "echo": _CHATML,
    "falcon": Family(special=("<|endoftext|>",), stops=("<|endoftext|>",)),
    "gemma": Family(special=_GEMMA, stops=("<eos>", "<end_of_turn>"), kind="metaspace"),
    "gemma_calls": Family(
        special=(*_GEMMA, "<call>", "</call>", "<response>", "</response>", "<escape>", "<declare>"),
        stops=("<eos>", "<end_of_turn>", "<response>"),
    ),
    "glm4": _GLM,
    "glm45": _GLM,
    "granite": _GRANITE,
    "harmony": Family(
        special=("<|return|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>"), stops=("<|return|>", "<|call|>")
    ),
    "hermes": _CHATML,
    "llama2": Family(special=_PLAIN_S, stops=("</s>",), kind="metaspace_always"),
    "llama3": _LLAMA3,
    "llama31": _LLAMA3,
    "ministral": Family(
        special=(*_MISTRAL, "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[ARGS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), stops=("</s>",)
    ),
    "mistral": Family(special=(*_MISTRAL, "[TOOL_RESULTS]", "[/TOOL_RESULTS]"), stops=("</s>",), kind="metaspace"),
    "nemotron": Family(
        special=("<SPECIAL_12>", "<s>", "<SPECIAL_10>", "<SPECIAL_11>"),
        stops=("<SPECIAL_12>",),
        added=("<think>", "</think>", "<TOOLCALL>", "</TOOLCALL>", "<TOOL_RESPONSE>", "</TOOL_RESPONSE>"),
    ),
    "olmo": Family(special=("<|endoftext|>",), stops=("<|endoftext|>",), added=("  ", "    ")),
    "phi3": Family(
        special=("<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
        stops=("<|endoftext|>", "<|end|>"),
        kind="metaspace_always",
        takes_space_after=True,
    ),
    "phi4": Family(
        special=("<|im_end|>", "<|im_start|>", "<|im_sep|>", "<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>"),
        stops=("<|im_end|>",),
    ),
    "pythonic": _CHATML,
    "qwen25": _QWEN,
    "qwen3": _QWEN,
    "qwen35": _QWEN,
    "run_together": _GRANITE,
    "smollm": Family(special=_IM, stops=("<|im_end|>",), added=_TAGS),
    "vicuna": Family(special=_PLAIN_S, stops=("</s>",), kind="metaspace_always"),
    "zephyr": Family(special=_PLAIN_S, stops=("</s>",), kind="metaspace"),
}  # fmt: skip


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    family = FAMILIES[name]
    core = _bytes() if family.kind == "bytes" else _metaspace(always=family.kind == "metaspace_always")
    core.add_special_tokens([AddedToken(t, rstrip=family.takes_space_after, normalized=False) for t in family.special])
    core.add_tokens([AddedToken(text, normalized=False) for text in family.added])
    begin = [text for text in family.special if "begin" in text or text.lower() in ("<s>", "<bos>", "<bos_token>")]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=family.special[0], bos_token=begin[0] if begin else None, clean_up_tokenization_spaces=False
    )  # fmt: skip
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    return tokenizer


@cache
def with_two_templates() -> PreTrainedTokenizerFast:
    """One for conversations without tools and another one with them, as Hermes 3."""
    tokenizer = copy.deepcopy(tokenizer_of("hermes"))
    words, calls = ((TEMPLATES / f"{name}.jinja").read_text() for name in ("chatml", "hermes"))
    tokenizer.chat_template = {"default": words, "tool_use": calls}
    return tokenizer


@cache
def turns_of(name: str) -> Turns:
    tokenizer = tokenizer_of(name)
    return Turns(tokenizer, stop_token_ids=tokenizer.convert_tokens_to_ids([*FAMILIES[name].stops]))


@cache
def report_of(name: str) -> ChatReport:
    return chat_report(turns_of(name))


def _bytes() -> Tokenizer:
    """Byte-level BPE with a few merges, as GPT-2 and its heirs."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        [_PROSE], trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    return core


def _metaspace(*, always: bool) -> Tokenizer:
    """As SentencePiece: words begin with a mark, unknown characters are bytes. `always`: after each control token, too, as Llama 2's."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "\n", *map(chr, range(33, 127))]
    merges = [("▁", "a"), ("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "▁"), ("e", "r")]
    pieces += ["".join(pair) for pair in merges]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    core = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if always:
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(inner)
    return core

"""Reads hydra settings from the words of a shell script. The script never runs."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from cluster.contracts.errors import ConfigError
from deploy.config.yaml_text import parse

WORD = re.compile(r"(?P<mark>[+~]{0,2})(?P<name>[\w./@-]+)(?P<more>\+?)=(?P<text>.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:([^\W\d]\w*)|\{([^\W\d]\w*)([^\[\]]*)\})")
"""A word that is `$name`, `${name}`, or `${name:-...}` and the like. Not `"${name[@]}"`: words of an array are read where it is filled."""
_DEFAULT = re.compile(r"\$\{([^\W\d]\w*):?-([^${}]*)\}")
"""`${name:-value}` with a plain value."""
_ARRAY = re.compile(r"\$\{\w+\[[@*]\]\}")
"""A word that is all words of an array."""
_PROGRAM = "-m"
"""Python's option for the program that gets the settings."""
_OPTIONS = {
    _PROGRAM: _PROGRAM,
    "--config-name": "--config-name",
    "-cn": "--config-name",
    "--config-path": "--config-path",
    "-cp": "--config-path",
}
"""Options with a value: the program, and those of hydra that name the main file, long and short."""
_GROUPS = ("model_engine",)
"""Hydra's settings without a dot. All other words without a dot set variables."""
_ENDS = "\n;&|()"
_MARKED = re.compile(
    r"""(?P<quoted>'[^']*'|"(?:[^"\\]|\\.)*"|\\[^\n])"""
    r"""|(?P<computed>\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))"""
    r"""|\\\n|`\#[^`]*`|(?<![^\s;&|()])\#[^\n]*""",
    re.DOTALL,
)
"""Line continuations and comments, which are removed unless they are quoted, and `$(...)`, which stays one word."""


class Unresolved(str):
    """The text of a value that the file does not determine."""

    __slots__ = ()


class Default(str):
    """The text of a variable that the environment may set, by the script's default."""

    __slots__ = ()


def settings(path: str, *, way_out: str) -> dict[str, Any]:
    """Words `a.b=value` are settings, as are hydra's options for the main file and the program after `-m` in a command with settings. Words
    `name=value` set variables, which replace `$name` and `${name}` in later words. Any other `$` is unresolved. So is a variable or setting
    that gets a second value: which one a shell takes may depend on an `if`. `${name:-value}` is the value if nothing before sets the
    variable, and `$name` is then a `Default` in the result.

    Raises ConfigError for a file that cannot be read or has no settings.
    """
    try:
        commands = list(_commands(Path(path).read_text(encoding="utf-8-sig")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; {way_out}") from error
    variables = {"HOME": "~"}
    defaults: dict[str, str] = {}
    values: dict[str, Any] = {}
    for words in commands:
        for name, value in _of_a_command(words, variables, defaults, source=path).items():
            earlier = values.get(name, value)
            values[name] = value if earlier == value else Unresolved(f"{earlier} or {value}")
    if not values:
        raise ConfigError(f"{path} holds no settings as key=value; {way_out}")
    return {f"${name}": Default(text) for name, text in defaults.items()} | values


def named(word: re.Match[str]) -> str:
    """The name without hydra's +. A setting that hydra removes keeps its ~, and is refused as unknown."""
    return word["name"] if word["mark"] != "~" else f"~{word['name']}"


def _commands(text: str) -> Iterator[list[str]]:
    """The words of each command, and of each array."""

    def read(found: re.Match[str]) -> str:
        return shlex.quote(found["computed"]) if found["computed"] else (found["quoted"] or "").replace("\\\n", "")

    lexer = shlex.shlex(_MARKED.sub(read, text), posix=True, punctuation_chars=_ENDS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    words: list[str] = []
    depth = 0
    for token in lexer:
        opened, closed = token.count("("), token.count(")")
        if not token or token.strip(_ENDS):
            words.append(token)
        elif not depth or opened or closed:
            depth = max(depth + opened - closed, 0)
            yield words
            words = []
    yield words


def _of_a_command(
    words: Sequence[str], variables: dict[str, str], defaults: dict[str, str], *, source: str
) -> dict[str, Any]:
    """Settings of one command, in which hydra takes the later of two values. Sets `variables`, and `defaults` of variables that are not."""

    def default(found: re.Match[str]) -> str:
        name, text = found.groups()
        is_clear = name not in variables and defaults.setdefault(name, text) == text
        return text if is_clear else found[0]

    found: dict[str, Any] = {}
    unknown: list[str] = []
    has_settings = False
    for word in _with_whole_options(_expanded(words, variables)):
        if found and _VARIABLE.fullmatch(word):  # options of the launcher come before
            unknown.append(word)
        has_settings = has_settings or (bool(found) and _ARRAY.fullmatch(word) is not None)
        setting = WORD.fullmatch(word)
        if setting is None:
            continue
        name, text = setting["name"], _DEFAULT.sub(default, Template(setting["text"]).safe_substitute(variables))
        is_variable = "." not in name and not setting["mark"] and not name.startswith("-")
        if is_variable:
            is_clear = not setting["more"] and variables.get(name, text) == text
            variables[name] = text if is_clear else Unresolved(f"${name}")
        if not is_variable or name in _GROUPS:
            found[named(setting)] = Unresolved(text) if "$" in text else parse(text, source=f"{source}, {name}")
            has_settings = has_settings or name != _PROGRAM
    return found | {word: Unresolved(word) for word in unknown} if has_settings else {}


def _expanded(words: Sequence[str], variables: Mapping[str, str]) -> Iterator[str]:
    """The words, with the words of its value in the place of a known `$name`: a shell splits it at spaces and ignores quotes in it."""
    for word in words:
        found = _VARIABLE.fullmatch(word)
        text = variables.get(found[1] or found[2]) if found and not found[3] else None
        if text is None or isinstance(text, Unresolved):
            yield word
        else:
            yield from text.split()


def _with_whole_options(words: Iterator[str]) -> Iterator[str]:
    """The words, with `--config-name=x` for `--config-name x` and `-cn x`, and `-m=x` for `-m x`."""
    for word in words:
        option, equals, value = word.partition("=")
        yield f"{_OPTIONS[option]}={value if equals else next(words, '')}" if option in _OPTIONS else word

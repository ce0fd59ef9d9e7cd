"""YAML as people expect it: `3e-4` is a number, `on` and `no` are texts, and a key given twice is an error."""

import math
import re
from pathlib import Path
from typing import Any

import yaml

from cluster.contracts.errors import ConfigError, headline

NO_VALUE = (ValueError, LookupError, AttributeError, RecursionError)
"""PyYAML's errors that are not its own classes: for an invalid value of a type (`2024-13-45`), and for too deep nesting."""

_MERGE = "tag:yaml.org,2002:merge"


class StrictLoader(yaml.SafeLoader):
    """PyYAML's loader takes the last value of a key that is given twice. Here that is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != _MERGE]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)


class _Loader(StrictLoader):
    """YAML 1.2 numbers and booleans instead of PyYAML's 1.1. As in 1.2, a date is a text, and there are no merge keys (`<<`)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        for key, _ in node.value:
            if key.tag == _MERGE:
                problem = "'<<' is not supported, write out the mapping that it merges"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
        return super().construct_mapping(node, deep=deep)

    def construct_document(self, node: yaml.Node) -> Any:
        """Constructs all values at once: mappings that are filled in later may contain themselves."""
        made = self.construct_object(node, deep=True)
        self.constructed_objects, self.recursive_objects = {}, {}
        return made

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node in self.recursive_objects:
            raise yaml.constructor.ConstructorError(None, None, "an anchor contains itself", node.start_mark)
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, LookupError, AttributeError) as error:  # `!!int abc`, a number of 5,000 digits
            problem = f"{str(node.value)[:40]!r} is not a value of its type"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

    def construct_yaml_str(self, node: yaml.ScalarNode) -> str:
        """Joins a character that is written in two halves, as JSON writes characters above U+FFFF."""
        return _HALVES.sub(
            lambda found: found[0].encode("utf-16", "surrogatepass").decode("utf-16"), super().construct_yaml_str(node)
        )

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        digits = str(self.construct_scalar(node)).replace("_", "")
        base = {"0x": 16, "0o": 8}.get(digits.lstrip("+-")[:2], 10)
        return int(digits, base)


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag not in [f"tag:yaml.org,2002:{kind}" for kind in ("bool", "float", "int", "timestamp", "value")]
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_FLOAT = re.compile(
    r"^[-+]?(?:(?:\d[\d_]*\.\d*|\.\d+)(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
_INT = re.compile(r"^[-+]?(?:\d[\d_]*|0x[\da-fA-F]+|0o[0-7]+)$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:str", _Loader.construct_yaml_str)
_HALVES = re.compile("[\ud800-\udbff][\udc00-\udfff]")


class Dumper(yaml.SafeDumper):
    """Quotes a text that YAML 1.1 or 1.2 would read as a number. A text with a rare line end, such as U+0085, gets double quotes: in single
    quotes it would be read as a space."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = '"' if _LINE_ENDS.search(data) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_LINE_ENDS = re.compile("[\x85\u2028\u2029]")
Dumper.add_representer(str, Dumper.represent_str)
Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
Dumper.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))


def parse(text: str, *, source: str) -> Any:
    """The document's values. Raises ConfigError with `source` and the line."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or headline(error)
        raise ConfigError(f"{source}{where} cannot be read as YAML: {problem}; correct that line") from error
    except RecursionError as error:
        raise ConfigError(
            f"{source} cannot be read as YAML: it is nested too deeply; write it with fewer levels"
        ) from error


def has_comment(text: str) -> bool:
    """Whether a readable document ends with a comment, which is no part of its value."""
    return bool(text[max((each.end_mark.index for each in _content(text)), default=0) :].strip())


def has_folded_text(text: str) -> bool:
    """Whether a readable document has a text of several lines, with or without quotes, which YAML joins to one. Blocks stay as they are."""
    of_texts = (each for each in _content(text) if isinstance(each, yaml.ScalarToken) and each.style not in ("|", ">"))
    return any(each.start_mark.line < each.end_mark.line for each in of_texts)


def _content(text: str) -> list[yaml.Token]:
    """Without tokens at the end of a document, behind its comments."""
    ends = (yaml.StreamStartToken, yaml.StreamEndToken, yaml.BlockEndToken)
    return [each for each in yaml.scan(text) if not isinstance(each, ends)]


def read_yaml(path: str | Path, *, way_out: str) -> Any:
    """A file's values. Raises the errors of `read_text` and `parse`."""
    return parse(read_text(path, way_out=way_out), source=str(path))


def read_text(path: str | Path, *, way_out: str) -> str:
    """The file's text. Raises ConfigError with the file's name, and with `way_out` if there is no readable file."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; {way_out}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}; save it as UTF-8, or {way_out}") from error


def dumped(values: Any) -> str:
    """Text that `parse` reads as the same values."""
    return yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def flow(value: Any) -> str:
    """One line that `parse` reads as the same value."""
    text = yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=math.inf, default_flow_style=True)
    return text.removesuffix("...\n").rstrip()

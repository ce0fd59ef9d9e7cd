"""README and documentation name commands, settings, files and places that are there. The convention: `tests/pages.py`."""

import ast
import copy
import json
import re
import shlex
from pathlib import Path

import pytest
import typer

from cluster.contracts.config import RunConfig
from cluster.contracts.plugins import ENVIRONMENTS, PROMPTS, REWARDS, resolve
from cluster.contracts.settings import marks, section_in
from deploy.cli import app
from deploy.config.loading import read, validated
from deploy.config.yaml_text import parse
from deploy.manifests import site
from tests.pages import PAGES, ROOT, Block, anchors, blocks, blocks_of, inline_code, links, tables

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
SMALLEST = {"model": {"path": "m"}, "prompts": {"name": "file", "path": "p.jsonl"}}
QUICKSTART = read("deploy/runs/quickstart.yaml")
RUN = {"bash", "python"}
READ = {"yaml", "json"}
"""Read by the tests below."""
SHOWN = {"text", "promql", "nginx"}
"""Neither commands nor settings: output, and what tests of monitoring and of the viewer give to Prometheus and to nginx."""
OTHER_FILES = {"rubric.yaml", "site.yaml"}
"""YAML that is no run file. Tests of rubrics read the first."""
TOP = "actors cluster deploy docs learner tests treadwheel"
_PATH = re.compile(rf"(?:{TOP.replace(' ', '|')})/[\w./*-]*")
_OVERRIDE = re.compile(rf"(?:^| )(?=(?:[a-z_]+(?:\.\w+)+|{'|'.join(RunConfig.model_fields)})=)")
_CLI = typer.main.get_command(app)
PLACES = (None, "while", "until", "if", "then", "do", "!", "--", "time", "exec")
"""Words behind which a command begins, besides punctuation."""


def pages_of(texts) -> list:
    """(page, text) of all pages."""
    return [
        pytest.param(text, id=f"{page}: {text}"[:100])
        for page in PAGES
        for text in sorted(set(texts((ROOT / page).read_text(encoding="utf-8"))))
    ]


def places(chosen) -> list:
    return [pytest.param(block, id=block.place) for block in BLOCKS if chosen(block)]


def commands(text: str) -> list[list[str]]:
    """Arguments of each `treadwheel` in a piece of bash."""
    found: list[list[str]] = []
    rest = ""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(f"{rest}{line}", posix=True, punctuation_chars="();<>|&$`")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # a quotation goes on in the next line
            rest += f"{line}\n"
            continue
        rest, before, current = "", None, None
        for word in words:
            if re.fullmatch(r"[();<>|&$`]+", word):
                current = before = None
                continue
            if current is not None:
                current.append(word)
            elif Path(word).name == "treadwheel" and before in PLACES:
                found.append(current := [])
            before = before if re.match(r"\w+=", word) else word
    return found


def test_the_commands_of_a_line_are_found():
    text = 'KEY=1 treadwheel info a | cat\nrun -- x/treadwheel \\\n  runs # more\ncd treadwheel; a $(treadwheel list) "b\nc"'
    assert commands(text) == [["info", "a"], ["runs"], ["list"]]


def test_comments_above_a_fence_are_its_own():
    text = "<!-- before: a\nb -->\n<!-- not run: why -->\n```bash\nc\n```\nthen\n```python\n# d.py, this\n```\n"
    one, other = blocks("page.md", text)
    assert (one.before, one.not_run, one.language, one.text, one.line) == ("a\nb", "why", "bash", "c\n", 4)
    assert (other.before, other.not_run, other.file) == (None, None, "d.py")


def parsed(arguments: list[str], *, is_whole: bool) -> None:
    """As the command would, short of running it. Raises for a verb and an option that is not there, and in whole commands for values.

    A text may leave arguments out (`treadwheel replay --learned`).
    """
    command, context, left = _CLI, None, list(arguments)
    while hasattr(command, "commands") and left and not left[0].startswith("-"):
        context = command.context_class(command, info_name=command.name, parent=context)
        _, command, left = command.resolve_command(context, left)
    if is_whole:
        command.make_context(command.name, left, parent=context)
        return
    there = {option for each in command.params for option in each.opts}
    assert {word.partition("=")[0] for word in left if word.startswith("-")} <= there, f"{arguments}: {there}"


def settings_of(arguments: list[str]) -> list[str]:
    """That a command has for its run. A variable of the shell, where the words are cut, stands for a value."""
    is_of_run = arguments[0] in ("train", "quickstart", "learn")
    found = [word for word in arguments if re.match(r"[a-z_.]+=", word)] if is_of_run else []
    return [f"{word}VALUE" if word.endswith("=") else word for word in found]


@pytest.mark.parametrize("block", places(lambda block: True))
def test_every_block_is_run_or_read_or_says_why_not(block: Block):
    assert block.language in RUN | READ | SHOWN, f"{block.place}: name the language of the fence: `text` for output"
    assert block.not_run != "", f"{block.place}: say why it is not run"
    for named in _PATH.findall(block.not_run or ""):
        assert list(ROOT.glob(named)), f"{block.place}: {named} is not there"


@pytest.mark.parametrize("block", places(lambda block: block.language == "bash" and commands(block.text)))
def test_commands_of_a_block_are_those_of_the_command_line(block: Block):
    for arguments in commands(block.text):
        parsed(arguments, is_whole=True)


@pytest.mark.parametrize("block", places(lambda block: any(map(settings_of, commands(block.text)))))
def test_settings_of_a_blocks_commands_can_be_set(block: Block):
    for arguments in commands(block.text):
        validated(copy.deepcopy(QUICKSTART), settings_of(arguments))


@pytest.mark.parametrize("text", pages_of(lambda text: (code for code in inline_code(text) if commands(code))))
def test_commands_in_a_text_are_those_of_the_command_line(text: str):
    for arguments in commands(text):
        parsed(arguments, is_whole=False)


@pytest.mark.parametrize("block", places(lambda block: block.language == "python"))
def test_every_block_of_python_is_python(block: Block):
    ast.parse(block.text)


def test_every_block_of_json_is_json():
    for block in BLOCKS:
        if block.language == "json":
            json.loads(block.text)


@pytest.mark.parametrize(
    "block", places(lambda block: block.language == "yaml" and block.file not in OTHER_FILES and not block.not_run)
)
def test_a_run_file_names_settings_and_parameters_that_are_there(block: Block):
    values = SMALLEST | parse(block.text, source=block.place)
    if not values["prompts"].keys() & {"name", "sources"}:  # parameters of the quickstart's source
        values["prompts"] = QUICKSTART["prompts"] | values["prompts"]
    config = validated(values, source=block.place)
    for setting, judge in config.reward.judges().items():
        if ":" not in judge.name and "function" not in judge.params:  # else it is the reader's own
            resolve(judge, home=REWARDS, field=setting)
    for environment in config.named_environments.values():
        if ":" not in environment.name:
            resolve(environment, home=ENVIRONMENTS, field="environment")
    for source in config.prompts.sources.values() or [config.prompts]:
        resolve(source, home=PROMPTS, field="prompts")


@pytest.mark.parametrize("block", places(lambda block: block.file == "site.yaml"))
def test_a_site_file_is_one(tmp_path, block: Block):
    (tmp_path / "site.yaml").write_text(block.text)
    assert site.load(str(tmp_path / "site.yaml")) != site.Site()


def overrides(text: str) -> list[str]:
    """`a.b=c d.e=f`, a line each; not `section.setting=...`, which stands for any setting, nor messages with a gap (…)."""
    codes = (code for code in inline_code(text) if "section.setting" not in code and "…" not in code)
    return [_OVERRIDE.sub("\n", code).strip() for code in codes if _OVERRIDE.match(code)]


@pytest.mark.parametrize("text", pages_of(overrides))
def test_settings_with_values_can_be_set(text: str):
    validated(copy.deepcopy(SMALLEST), text.split("\n"))


OF_OTHERS = "docs/coming_from.md"
"""It names settings of other systems; those of ours stand in tables that tests of `deploy/importing` hold."""
SETTINGS = {name for name, _ in marks(RunConfig)}
SECTIONS = {name for name, field in RunConfig.model_fields.items() if section_in(field)}


def settings(text: str) -> list[str]:
    """`section.setting` without a value. Files and modules may begin as sections do."""
    found = (code for code in inline_code(text) if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", code))
    return [
        code
        for code in found
        if code.partition(".")[0] in SECTIONS
        and not code.endswith((".jsonl", ".py", ".md", ".yaml"))
        and not (ROOT / code.replace(".", "/")).exists()
        and not (ROOT / f"{code.replace('.', '/')}.py").exists()
    ]


@pytest.mark.parametrize("page", [page for page in PAGES if page != OF_OTHERS])
def test_settings_without_values_are_there(page: str):
    assert [name for name in settings((ROOT / page).read_text(encoding="utf-8")) if name not in SETTINGS] == []


METRICS = set(inline_code((ROOT / "docs/metrics.md").read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", PAGES)
def test_places_of_the_repository_are_there(page: str):
    named = [
        found[0].rstrip(".")
        for code in inline_code((ROOT / page).read_text(encoding="utf-8"))
        for word in code.split()
        if (found := re.match(rf"{_PATH.pattern}$", word))
    ]
    assert [place for place in named if place not in METRICS and not list(ROOT.glob(place))] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str):
    text = (ROOT / page).read_text(encoding="utf-8")
    for link in links(text):
        if ":" in link:
            continue
        place, _, anchor = link.partition("#")
        target = (ROOT / page).parent / place if place else ROOT / page
        assert target.exists(), f"{page}: {link} is not there"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{page}: {link} has no such heading"


@pytest.mark.parametrize("page", PAGES)
def test_no_row_of_a_table_has_more_cells_than_its_head(page: str):
    def num_cells(line: str) -> int:
        return len(re.split(r"(?<!\\)\|", line.strip().removeprefix("|").removesuffix("|")))

    text = (ROOT / page).read_text(encoding="utf-8")
    cut = [line for head, *lines in tables(text) for line in lines if num_cells(line) > num_cells(head)]
    assert cut == [], "what is beyond the head is not shown; write \\| in a cell"


TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES)
def test_targets_of_make_are_there(page: str):
    bash = [block.text for block in BLOCKS if block.page == page and block.language == "bash"]
    code = inline_code((ROOT / page).read_text(encoding="utf-8"))
    named = [target for text in [*bash, *code] for target in re.findall(r"^(?:.*&& )?make ([a-z-]+)", text, re.M)]
    assert set(named) <= TARGETS

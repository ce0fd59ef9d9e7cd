"""The folder in which a page is followed, and all that differs there from what a reader does.

`python -m tests.integration.page_folder` is the folder's `treadwheel`.
"""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from tests.integration.commands import environment, imported_once
from tests.pages import ROOT, Block, blocks_of

NUM_STEPS = 3


@dataclass(frozen=True, slots=True)
class Replaced:
    """In blocks, and in run files of the repository."""

    pattern: str
    by: str
    why: str


REPLACED = (
    Replaced(r"\bQwen/[\w.-]+", str(ROOT / "deploy/quickstart/model"), "no network and no GPU: the embedded model"),
    Replaced(r"\b(num_steps[=:] *)\d+", rf"\g<1>{NUM_STEPS}", "all runs are short"),
    Replaced(r"\b(groups_per_step[=:] *)\d+", r"\g<1>8", "steps of a fraction of a second"),
    Replaced(r"\b(max_tokens[=:] *)\d+", r"\g<1>6", "answers of the embedded model are short, and its context is"),
    Replaced(r"\b(num_prompts[=:] *)\d+", r"\g<1>16", "evaluations of a fraction of a second"),
    Replaced(r"(--(?:to-step|learned|step|serve)[ =])\d+", rf"\g<1>{NUM_STEPS}", "short runs have no later step"),
    Replaced(r"(--steps[ =])\d+-\d+", rf"\g<1>1-{NUM_STEPS}", "the same"),
    Replaced(r"(--port[ =])\d+", r"\g<1>0", "the port may be another program's"),
    Replaced(r"\bstep=\d+", f"step={NUM_STEPS}", "the same"),
    Replaced(r"\bstep-0\d{5}\b", f"step-{NUM_STEPS:06}", "the same"),
)
CUT = (
    f"num_steps={NUM_STEPS}",
    "buffer.groups_per_step=8",
    "evaluation.num_prompts=16",
    "rollout.kv_cache_bytes=67108864",
)
"""Settings at the end of each of `_TRAINING`: run files of `init` and `quickstart` are not of the page."""
_TRAINING = ("train", "learn", "quickstart")
_SERVING = ("view", "serve-reward")
"""They run until they answer a request, and are stopped by Ctrl-C then."""
_ANSWERS = {
    "doctor": 1,  # the machine of the tests may have faults
    "passport": 1,  # the runs differ
    "scale": 2,  # the run is over: tests/integration/test_elastic.py has living ones
}
"""Exit codes that say what is so here, besides 0."""
_MADE_BY_PAGE = {
    "runs/mine": r"train my_run\.yaml(?!.*run_dir=)",
    "runs/other": r"other\.yaml",
    "runs/quickstart": r"treadwheel quickstart(?!.*run_dir=)|train deploy/runs/quickstart\.yaml(?!.*run_dir=)",
    "runs/first": r"run_dir=runs/first",
}
"""Finished runs that a page finds if it names them, unless a block of this pattern makes them."""
_JUDGE = """

def judge(*, completion: str, columns: dict, threshold: float = 0.5) -> float:
    return float(right(completion=completion, columns=columns) > threshold)
"""
_NO_INSTALLATION = {"PIP_DRY_RUN": "1", "PIP_NO_INDEX": "1"}
"""`pip install` says whether the extra is there, and changes nothing."""


class Folder:
    """A page's folder, with the files that a reader has or writes beside those of the page."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._commands = path / ".venv/bin"
        self._put_repository()
        self._put_commands()
        starter = ROOT / "deploy/starters/judge"
        questions = [json.loads(line) for line in (starter / "prompts.jsonl").read_text().splitlines()]
        for name, rows in {
            "questions.jsonl": questions,
            "held_out.jsonl": [json.loads(line) for line in (starter / "held_out.jsonl").read_text().splitlines()],
            "rows.jsonl": [{**row, "completion": row["answer"], "reward": 1.0} for row in questions[:8]],
        }.items():
            self.write(name, "".join(f"{json.dumps(row)}\n" for row in rows))
        quickstart = (ROOT / "deploy/runs/quickstart.yaml").read_text()
        self.write("my_run.yaml", quickstart.replace("runs/quickstart", "runs/mine"))
        self.write("other.yaml", quickstart.replace("runs/quickstart", "runs/other"))
        self.write("grpo.yaml", (ROOT / "tests/unit/deploy/importing/configs/trl_gsm8k.yaml").read_text())
        self.write("my_rewards.py", (starter / "my_rewards.py").read_text() + _JUDGE)
        (game,) = (block for block in blocks_of("docs/environments.md") if block.file == "my_envs.py")
        self.write("my_envs.py", game.text)

    def write(self, name: str, text: str) -> Path:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(replaced(text), encoding="utf-8")
        return file

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        ours = {**environment(), **imported_once(), **_NO_INSTALLATION, "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            command,
            cwd=self.path,
            env={**ours, "PATH": f"{self._commands}{os.pathsep}{ours['PATH']}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    def bash(self, text: str) -> subprocess.CompletedProcess[str]:
        return self.run("bash", "-euo", "pipefail", "-c", replaced(text))

    def _put_repository(self) -> None:
        """What pages name of it. Run files are copies, cut."""
        (self.path / "deploy").mkdir()
        for place in (ROOT / "deploy").iterdir():
            if place.is_dir() and place.name != "runs":
                (self.path / "deploy" / place.name).symlink_to(place)
        for file in (ROOT / "deploy/runs").rglob("*.yaml"):
            self.write(str(file.relative_to(ROOT)), file.read_text())

    def _put_commands(self) -> None:
        command = self._commands / "treadwheel"
        command.parent.mkdir(parents=True)
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m {__spec__.name} "$@"\n')
        command.chmod(0o755)


def runs_found(page: list[Block]) -> list[str]:
    text = "\n".join(block.text for block in page if block.not_run is None)
    return [
        name
        for name, made in _MADE_BY_PAGE.items()
        if re.search(rf"(?<![\w/]){name}(?![\w.-])", text) and not re.search(made, text)
    ]


def replaced(text: str) -> str:
    for each in REPLACED:
        text = re.sub(each.pattern, each.by, text)
    return text


def main(arguments: list[str]) -> int:
    verb = next(iter(arguments), "")
    command = [sys.executable, "-P", "-m", "deploy.cli", *arguments]
    if verb in _TRAINING:
        command += CUT
    if verb in _SERVING and "--export" not in arguments:
        return _answers(command)
    code = subprocess.run(command, check=False).returncode
    return 0 if code == _ANSWERS.get(verb) else code


def _answers(command: list[str]) -> int:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        url = next((found[0] for line in serving.stdout if (found := re.search(r"http://\S+", line))), None)
        if url is None:
            return serving.wait() or 1
        try:
            with urllib.request.urlopen(url, timeout=120) as answer:
                print(url, answer.status)
        except urllib.error.HTTPError as refusal:  # a server of rewards has no page
            print(url, refusal.code)
        serving.send_signal(signal.SIGINT)
        serving.stdout.read()
        return 0 if serving.wait() in (0, 130) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

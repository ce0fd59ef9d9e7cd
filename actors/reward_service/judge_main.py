"""A process that runs one synchronous judge: JSON lines in, JSON lines out. Started, and killed at a deadline, by the reward service.

A thread that hangs cannot be ended, a process can. It resolves the judge by name itself, so no code travels and nothing is pickled.

In, first line: the judge's name and parameters. Then one line a request, a list of [prompt, completion, columns].
Out: `{"ready": true}` or `{"refused": why}`; then one line a row, as soon as it is judged: [value, status, components, message].
"""

import ctypes
import json
import os
import signal
import sys
from typing import Any, TextIO

from actors.reward_service.judgement import find_judge, judge_now
from cluster.contracts.errors import ConfigError
from cluster.contracts.plugins import Plugin


def main() -> None:
    _die_with_parent()
    requests, answers = _own_pipes()
    request = json.loads(requests.readline())
    try:
        judge = find_judge(Plugin(name=request["name"], params=request["params"]))
    except ConfigError as error:
        _say(answers, {"refused": str(error)})
        return
    _say(answers, {"ready": True})
    for line in requests:
        for prompt, completion, columns in json.loads(line):
            reward = judge_now(judge, prompt=prompt, completion=completion, columns=columns)
            # Row by row: the service sees which row hangs, and keeps what was judged before it.
            _say(answers, [reward.value, reward.status, reward.components, reward.message])


def _say(answers: TextIO, message: Any) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _own_pipes() -> tuple[TextIO, TextIO]:
    """The pipes to and from the service. What a judge or its children print goes to stderr, and they find nothing to read."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return requests, answers


def _die_with_parent() -> None:
    """A hanging judge does not notice that its pipe closed: without this it would outlive a killed service (Linux only)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    main()

"""docs/variants.md: judges, prompt sources, sinks and transports, the built-in ones and the form of your own."""

import inspect
from collections.abc import Iterator
from typing import Any

from cluster.contracts.protocols import PromptSource, Transport
from cluster.metrics import Sink
from deploy.docs import NOTE, cell
from deploy.listing import KINDS, described, overview

EXAMPLE = """\
def judge(*, prompt: str, completion: str, columns: dict, bonus: float = 0.1) -> dict[str, float]:
    is_right = completion.strip() == str(columns["answer"])
    is_short = len(completion) < 100
    return {"reward": is_right + bonus * is_short, "right": is_right, "short": is_short}
"""

_INTRODUCTION = """\
# Names in a run file
{note}

A setting of kind *variant* takes a name, or a mapping of name and parameters; a function or class of yours goes by full path. Parameters
are checked against the signature before anything starts. `treadwheel list` shows all names, `treadwheel list rewards` one kind in full.

```yaml
reward: {{judge: math_verify}}
prompts: {{name: file, path: train.jsonl}}
algorithm: {{policy_loss: {{name: ppo_clip, epsilon_high: 0.28}}, advantage: my_package.maths:my_advantage}}
```"""

_JUDGES = """\
A judge scores one finished completion. It is called with `prompt` and `completion` (texts) and `columns` (everything else that the prompt
source knows of this prompt), all by keyword; its other parameters are yours to set. It may be `async`.

It returns one of

* a number;
* a dict of numbers with `reward` among them: the others are components, and become the metrics `reward/<name>`; a component is `None`
  where the trajectory does not have it;
* a `cluster.contracts.types.Reward`.

Anything else (text, `None`, NaN, infinity), an exception, and an overrun deadline (`reward.timeout_s`) make the reward *failed*, which is
not a reward of 0: the trajectory does not train.

```python
{example}```

```yaml
reward: {{judge: {{name: "my_package.rewards:judge", bonus: 0.2}}}}
```"""

_PROMPT = """\
A prompt is a `cluster.contracts.types.Prompt`: a `prompt_id` of its own, `text` or chat `messages`, and `columns` for the judge. A `text`
alone is sent as it is. The chat template applies to `messages`; a prompt with both gets the template where the model has one."""


def page() -> str:
    """The whole of docs/variants.md."""
    judges = _JUDGES.format(example=EXAMPLE)
    sections = [
        _INTRODUCTION.format(note=NOTE),
        *("## Rewards", judges, _table("rewards")),
        *("## Prompt sources", _protocol(PromptSource), _PROMPT, _table("prompts")),
        *("## Metric sinks", _protocol(Sink), _table("sinks")),
        *("## Weight transports", _protocol(Transport), _table("transports")),
        *("## The mathematics", "Formulas, sources and parameters: [algorithms.md](algorithms.md).", _names()),
    ]
    return "\n\n".join(sections) + "\n"


def _table(word: str) -> str:
    kind = KINDS[word]
    lines = [f"`{kind.setting}` may name:", "", "| name | parameters | meaning |", "|---|---|---|"]
    for each in described(kind):
        parameters = "<br>".join(f"`{parameter}`" for parameter in each.parameters) or "none"
        lines.append(f"| `{each.name}` | {cell(parameters)} | {cell(each.meaning)} |")
    return "\n".join(lines)


def _protocol(protocol: type[Any]) -> str:
    """The methods of one of your own."""
    methods = [(name, item) for name, item in vars(protocol).items() if inspect.isfunction(item) and item.__doc__]
    lines = [f"* `{name}{_call(item)}`: {' '.join((item.__doc__ or '').split())}" for name, item in methods]
    return "\n".join([" ".join((inspect.getdoc(protocol) or "").split()), "", *lines])


def _call(method: Any) -> str:
    names = [name for name in inspect.signature(method).parameters if name != "self"]
    return f"({', '.join(names)})"


def _names() -> str:
    return "\n".join(f"* {line}" for line in _of_the_algorithm())


def _of_the_algorithm() -> Iterator[str]:
    return (line for line in overview() if "(algorithm." in line)

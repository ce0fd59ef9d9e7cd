"""Hides secrets in settings and texts that people see. A secret is recognized by the name of its setting, or by its own form."""

import re
from typing import Any, cast

_SECRET = re.compile(
    r"((^|[_.-])(authorization|password|passwd|passphrase|secret|token|credentials?)|[_-]key|(api|access)key"
    r"|(?-i:[a-z0-9](Password|Secret|Token|Credentials?)))$",
    re.IGNORECASE,
)
"""Names of settings, headers and URL parameters whose values are secret: `openai_key`, `X-Api-Key`, `accessToken`, `reward.judge.token`."""
_HARMLESS = re.compile(r"(^|[_.-])(answer_key|(stop|bos|eos|pad|unk)_token)$", re.IGNORECASE)
"""Names that sound like secrets and are none."""
_SCHEMA = "json_schema"
"""Setting whose keys are fields of an answer."""
_IN_TEXT = re.compile(
    r"(?<=://)[^/?#\s]+(?=@)|(?i:(?<=\bBearer ))\S+"
    # Tokens of Hugging Face, OpenAI and similar services, AWS, GitHub, GitLab, Slack, Google.
    r"|\bhf_[A-Za-z0-9]{20,}|\bsk-(?=[\w-]*\d)[\w-]{20,}|\bA[KS]IA[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{30,}"
    r"|\bgithub_pat_\w{22,}|\bglpat-[\w-]{20,}|\bxox[abprs]-[\w-]{10,}|\bAIza[\w-]{35}"
)
_ASSIGNED = re.compile(r"(-{0,2}[\w.-]+)=.+", re.DOTALL)
"""A whole text with an assignment, as on a command line: `reward.judge.api_key=...`, `--token=...`."""
_URL_PARAMETER = re.compile(r"(?<=[?&])([^=&#\s]+)=[^&#\s]+")
_SECRET_PARAMETER = re.compile(r"(^|-)(key|sig|signature|auth)$", re.IGNORECASE)
HIDDEN = "<hidden>"
_REPLACED = re.compile(rf"{HIDDEN}|.*(://|=|\bBearer ){HIDDEN}.*", re.IGNORECASE | re.DOTALL)


def is_secret(name: str) -> bool:
    """Whether all values below this name (of a setting, header or URL parameter) are secret, whatever their form."""
    return _SECRET.search(name) is not None and _HARMLESS.search(name) is None


def hidden(value: Any, name: str = "") -> Any:
    """The value of a setting of this name, without texts below a secret's name and secrets in other texts. Numbers are shown."""
    if isinstance(value, dict):
        within = name if is_secret(name) or name == _SCHEMA else None
        return {key: hidden(item, within or str(key)) for key, item in cast(dict[Any, Any], value).items()}
    if isinstance(value, list):
        return [hidden(item, name) for item in cast(list[Any], value)]
    if isinstance(value, str):
        return HIDDEN if is_secret(name) else _without_secrets(value)
    return value


def was_hidden(value: Any) -> bool:
    """Whether `hidden` has replaced a text in the value."""
    if isinstance(value, list | tuple):
        return any(map(was_hidden, cast(list[Any], value)))
    return isinstance(value, str) and _REPLACED.fullmatch(value) is not None


def _without_secrets(text: str) -> str:
    """Hides the secrets in a text: user:password@ or ?token= in a URL, a bearer's token in a header, --token=."""
    if (assigned := _ASSIGNED.fullmatch(text)) and is_secret(assigned[1]):
        return f"{assigned[1]}={HIDDEN}"

    def parameter(found: re.Match[str]) -> str:
        is_hidden = is_secret(found[1]) or _SECRET_PARAMETER.search(found[1])
        return f"{found[1]}={HIDDEN}" if is_hidden else found[0]

    return _URL_PARAMETER.sub(parameter, _IN_TEXT.sub(HIDDEN, text))


def shown(value: Any, name: str) -> str:
    """The value in an error about a setting of this name. A number below a secret's name is hidden too: it may be misplaced."""
    return HIDDEN if is_secret(name) else repr(hidden(value))

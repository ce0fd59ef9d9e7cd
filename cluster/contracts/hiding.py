"""What looks like a secret is shown to nobody: by the name of what holds it, or by its own shape."""

import re
from typing import Any, cast

_SECRET = re.compile(
    r"((^|[_.-])(authorization|password|passwd|passphrase|secret|token|credentials?)|[_-]key|(api|access)key"
    r"|(?-i:[a-z0-9](Password|Secret|Token|Credentials?)))$",
    re.IGNORECASE,
)
"""Names of settings, headers and URL parameters whose values are nobody's business: `openai_key`, `X-Api-Key`, `accessToken`,
`reward.judge.token`."""
_IN_TEXT = re.compile(
    r"(?<=://)[^/?#\s]+(?=@)|(?i:(?<=\bBearer ))\S+"
    # Tokens by their shapes: Hugging Face, OpenAI and its like, AWS, GitHub, GitLab, Slack, Google.
    r"|\bhf_[A-Za-z0-9]{20,}|\bsk-(?=[\w-]*\d)[\w-]{20,}|\bA[KS]IA[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{30,}"
    r"|\bgithub_pat_\w{22,}|\bglpat-[\w-]{20,}|\bxox[abprs]-[\w-]{10,}|\bAIza[\w-]{35}"
)
_ASSIGNED = re.compile(r"(-{0,2}[\w.-]+)=.+", re.DOTALL)
"""A whole text, as a word of a command line has it: `reward.judge.api_key=...`, `--token=...`."""
_URL_PARAMETER = re.compile(r"(?<=[?&])([^=&#\s]+)=[^&#\s]+")
_SECRET_PARAMETER = re.compile(r"(^|-)(key|sig|signature|auth)$", re.IGNORECASE)
HIDDEN = "<hidden>"


def is_secret(name: str) -> bool:
    """Whether what stands below a name, that of a setting, header or URL parameter, is a secret whatever its shape."""
    return _SECRET.search(name) is not None


def hidden(value: Any, name: str = "") -> Any:
    """The value of a setting of this name, with what looks like a secret hidden, and all that stands below a secret's name. Numbers are
    shown."""
    if isinstance(value, dict):
        within = name if is_secret(name) else None
        return {key: hidden(item, within or str(key)) for key, item in cast(dict[Any, Any], value).items()}
    if isinstance(value, list):
        return [hidden(item, name) for item in cast(list[Any], value)]
    if isinstance(value, str):
        return HIDDEN if is_secret(name) else _without_secrets(value)
    return value


def _without_secrets(text: str) -> str:
    """A text that is no secret itself may carry one: user:password@ or ?token= in a URL, a bearer's token in a header, --token=."""
    if (assigned := _ASSIGNED.fullmatch(text)) and is_secret(assigned[1]):
        return f"{assigned[1]}={HIDDEN}"

    def shown(parameter: re.Match[str]) -> str:
        is_hidden = is_secret(parameter[1]) or _SECRET_PARAMETER.search(parameter[1])
        return f"{parameter[1]}={HIDDEN}" if is_hidden else parameter[0]

    return _URL_PARAMETER.sub(shown, _IN_TEXT.sub(HIDDEN, text))


def shown(value: Any, name: str) -> str:
    """In an error about a setting of this name, which may hold what belongs to another: a number is hidden too."""
    return HIDDEN if is_secret(name) else repr(hidden(value))

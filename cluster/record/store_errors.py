"""Messages for an object store's errors, in one line: the cause and what helps. Never a header, or a URL, which may carry a signature."""

import re

_CREDENTIALS = (
    "mend the credentials in the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS, "
    "or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY), or the role of this machine"
)
_RIGHTS = "give these credentials the right to list, read, write and delete there"
_BUCKET = "create it, or name another one"
_ADVICE = {
    "NoSuchBucket": _BUCKET,
    "ContainerNotFound": _BUCKET,
    "AccessDenied": _RIGHTS,
    "AllAccessDisabled": _RIGHTS,
    "AuthorizationFailure": _RIGHTS,
    "AuthorizationPermissionMismatch": _RIGHTS,
    "InvalidAccessKeyId": _CREDENTIALS,
    "SignatureDoesNotMatch": _CREDENTIALS,
    "AuthenticationFailed": _CREDENTIALS,
    "ExpiredToken": _CREDENTIALS,
    "InvalidToken": _CREDENTIALS,
    "RequestTimeTooSkewed": "set this machine's clock",
    "SlowDown": "the store was busy for minutes: start the same command again later",
}
_PASSING_STATUS = {"408", "409", "429", "500", "502", "503", "504"}
_OWN_SERVERS = (
    "169.254.169.254",
    "169.254.170.2",
    "metadata.google.internal",
    "Account must be specified",
    "MissingAccount",
)
"""Texts of errors from a search for the machine's own credentials."""


def message_of(error: Exception) -> str:
    text = _text(error)
    if isinstance(error, FileNotFoundError) and not is_of_the_bucket(error):
        return "it is missing: check the path, or bring it back from a copy"
    if code := _code(text):
        message = re.search(r"<Message>\s*([^<\n]*)", text)
        words = message[1].rstrip(". ") if message else "it was refused"
        return f"{words} ({code}); {_ADVICE.get(code, 'mend that, then start the same command again')}"
    if any(each in text for each in _OWN_SERVERS):
        return f"no credentials; {_CREDENTIALS}"
    if status := _status(text):
        advice = {"401": _CREDENTIALS, "403": _RIGHTS}.get(status[:3], "mend that, then start the same command again")
        return f"the store answered {status}; {advice}"
    if "configured region" in text:
        return "the bucket is in another region; set AWS_REGION to it"
    if "BadScheme" in str(error) or "builder error" in text:
        return "the store's URL is not one; mend AWS_ENDPOINT_URL or AZURE_STORAGE_ENDPOINT"
    if "HTTP error" in text:
        return "the store does not answer; check AWS_ENDPOINT_URL or AZURE_STORAGE_ENDPOINT, AWS_REGION and the network"
    return re.sub(r"\S+://\S+", "a URL", text.splitlines()[0] if text else type(error).__name__)


def is_of_the_bucket(error: Exception) -> bool:
    """Whether the bucket itself is missing, not an object in it."""
    return _code(_text(error)) in ("NoSuchBucket", "ContainerNotFound")


def may_pass(error: Exception) -> bool:
    """Whether the same request may succeed a little later."""
    return is_busy(error) or (not _status(_text(error)) and "HTTP error" in _text(error))


def is_busy(error: Exception) -> bool:
    """Whether the store answers, but takes nothing just now."""
    return _status(_text(error))[:3] in _PASSING_STATUS


def _text(error: Exception) -> str:
    return str(error).partition("\n\nDebug source")[0]


def _code(text: str) -> str:
    found = re.search(r"<Code>\s*(\w+)", text)
    return found[1] if found else ""


def _status(text: str) -> str:
    found = re.search(r"status code: (\d{3}[^:]*)", text)
    return found[1].strip() if found else ""

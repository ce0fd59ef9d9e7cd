"""Checks of the sandbox of judges that run programs: it starts, and it stops programs that try to get out."""

from pydantic import ValidationError

from actors.reward_service.recipe import parts_of
from cluster.contracts.errors import ConfigError
from cluster.contracts.plugins import Plugin
from cluster.contracts.reward_config import RewardConfig

_JUDGES = ("code_stdin", "code_function", "code_asserts")
_ATTEMPTS = {
    "reads a file": "open('/etc/passwd').read()",
    "lists a folder": "os.listdir('/')",
    "writes a file": "os.open('/tmp', os.O_TMPFILE | os.O_WRONLY)",
    "opens a socket": "socket.socket()",
    "starts a process": "os.fork() or os._exit(0)",
    "sends its parent a signal": "os.kill(os.getppid(), 0)",
    "reads its parent's memory": "open(f'/proc/{os.getppid()}/mem', 'rb').read(1)",
    "takes ten times its memory": "bytearray(10 * resource.getrlimit(resource.RLIMIT_AS)[0])",
}


def check_sandboxes(reward: RewardConfig) -> dict[str, str]:
    """How programs are confined, in words, by the setting of each judge that runs programs.

    Raises ConfigError if the machine cannot confine them, if a program gets out, or if the runs of one completion's program may take
    longer than the judge's deadline: a slow program would make a failed reward instead of a low one.
    """
    fields = {f"{part.setting}.judge": part for part in parts_of(reward)}
    return {
        field: _confined(part.judge, field=field, timeout_s=part.timeout_s)
        for field, part in fields.items()
        if part.judge.name.removeprefix("actors.rewards.code:") in _JUDGES
    }


def _confined(judge: Plugin, *, field: str, timeout_s: float) -> str:
    from actors.sandbox.sandbox import Sandbox, SandboxConfig

    try:
        settings = SandboxConfig.model_validate(judge.params.get("sandbox") or {})
    except ValidationError as error:
        raise ConfigError(
            f"{field}.sandbox is not valid: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}"
        ) from None
    if settings.total_s >= timeout_s:
        raise ConfigError(
            f"{field}.sandbox.total_s={settings.total_s:g} must be less than the judge's timeout_s={timeout_s:g}: a slow program would "
            "make a failed reward, and not a low one; lower it, or raise timeout_s"
        )
    sandbox = Sandbox(settings)
    try:
        if settings.level == "none":
            return "unconfined, as you"
        for act, attempt in _ATTEMPTS.items():
            if sandbox.run(f"import os, resource, socket\n{attempt}\nprint('done')").stdout:
                raise ConfigError(
                    f"{field}.sandbox is confined by {sandbox.confined_by}, and a program that {act} is not stopped"
                )
        return f"confined by {sandbox.confined_by}"
    finally:
        sandbox.close()

"""Checks of `reward.servers`, the language models that the run serves for its judges. No server starts, and their judges are only built."""

from cluster.contracts.config import ModelConfig, RewardConfig
from cluster.contracts.errors import ConfigError
from cluster.contracts.plugins import Plugin
from cluster.contracts.reward_config import server_of
from cluster.weights.model_files import refuse_unpinned


def check_servers(config: RewardConfig) -> RewardConfig | None:
    """The reward without the judges that ask `reward.servers`; None if no judge is left.

    Raises ConfigError for a model that is not pinned, does not load or has no chat template, and for a judge that cannot be built.
    """
    from actors.chat.formatter import ChatFormatter

    for name, server in config.servers.items():
        field = f"reward.servers.{name}"
        refuse_unpinned(server.path, server.revision, section=field)
        try:
            formatter = ChatFormatter.load(ModelConfig(path=server.path, revision=server.revision))
        except ConfigError as error:
            raise ConfigError(f"{field}: {error}") from error
        if not formatter.has_template:
            raise ConfigError(
                f"{field}.path={server.path!r} has no chat template, and judges send chat messages; use a model with a template"
            )
    asking = {setting for setting, judge in config.judges().items() if _asks_a_server(judge, config, setting)}
    parts = {name: part for name, part in config.parts.items() if f"parts.{name}.judge" not in asking}
    if not asking:
        return config
    recipes = {source: tuple(each for each in names if each in parts) for source, names in config.by_source.items()}
    left = {source: names for source, names in recipes.items() if names}
    return config.model_copy(update={"parts": parts, "by_source": left}) if parts else None


def _asks_a_server(judge: Plugin, config: RewardConfig, setting: str) -> bool:
    from actors.reward_service.judgement import find_judge

    if server_of(judge) is not None:
        return bool(find_judge(judge, field=f"reward.{setting}"))  # builds it, and so reads its rubric
    return bool(config.servers) and ":" in judge.name and "servers" in find_judge(judge).asks

"""One question, answered with the help of Python programs."""

from pydantic import PositiveInt

from actors.environments.python_tool import python_tool
from actors.sandbox.sandbox import SandboxConfig
from cluster.contracts.episodes import Episode


async def with_python(
    episode: Episode, *, sandbox: SandboxConfig | None = None, max_characters: PositiveInt = 4000
) -> None:
    """The model answers the prompt once, and may first run Python programs in a sandbox. The judges decide.

    `sandbox` may set level (`auto`, `landlock`, `bwrap`, `none`), time_s, memory_bytes, output_bytes, and imports, the packages that
    programs may use. The model sees at most `max_characters` of a program's output. Metric: `programs`, the number of calls.
    """
    said = await episode.ask(tools=[python_tool(sandbox=sandbox, max_characters=max_characters)])
    episode.log("programs", said.num_calls)

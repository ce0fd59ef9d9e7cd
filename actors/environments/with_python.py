"""A question, and Python to find the answer."""

from pydantic import PositiveInt

from actors.environments.python_tool import python_tool
from actors.sandbox.sandbox import SandboxConfig
from cluster.contracts.episodes import Episode


async def with_python(
    episode: Episode, *, sandbox: SandboxConfig | None = None, max_characters: PositiveInt = 4000
) -> None:
    """The model answers the prompt once, and may run Python programs in a sandbox before it does; the judges decide.

    `sandbox` may set level (`auto`, `landlock`, `bwrap`, `none`), time_s, memory_bytes, output_bytes, and imports: packages that programs
    may use. Of what a program prints the model sees `max_characters`.
    """
    said = await episode.ask(tools=[python_tool(sandbox=sandbox, max_characters=max_characters)])
    episode.log("programs", said.num_calls)

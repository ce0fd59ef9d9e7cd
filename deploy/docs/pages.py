"""All generated pages."""

from deploy.docs import algorithms, coming_from, configuration, metrics, monitoring, terminal, variants


def pages() -> dict[str, str]:
    """Content by file name below docs/."""
    return {
        "configuration.md": configuration.configuration(),
        "config_schema.json": configuration.schema(),
        "metrics.md": metrics.metrics(),
        "monitoring.md": monitoring.page(),
        "algorithms.md": algorithms.page(),
        "variants.md": variants.page(),
        "coming_from.md": coming_from.page(),
        "terminal.md": terminal.page(),
        "terminal.svg": terminal.svg(),
    }

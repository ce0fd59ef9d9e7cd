from typing import Any

from cluster.record.run_directory import METRICS, RunDirectory
from deploy.reports.curves import NAME, _plot, draw


def test_a_run_without_numbers_has_no_curves(tmp_path):
    assert not draw(RunDirectory(str(tmp_path)))


def test_curves_are_an_image(tmp_path):
    directory = RunDirectory(str(tmp_path))
    for version in range(3):
        directory.append_json(METRICS, {"policy_version": version, "time": 0.0, "reward/mean": 0.1 * version})
    assert draw(directory)
    assert directory.read_file(NAME).to_pybytes().startswith(b"\x89PNG")


class ListedLines:
    """Axes that keep what is plotted."""

    def __init__(self) -> None:
        self.lines: list[tuple[list[int], list[float]]] = []
        self.labels: list[str | None] = []

    def plot(self, versions: list[int], values: list[float], *, label: str | None, **_: Any) -> None:
        self.lines.append((versions, values))
        self.labels.append(label)


def test_no_line_is_drawn_between_evaluations_that_are_steps_apart():
    axes = ListedLines()
    _plot(axes, ("held-out accuracy", [0, 80, 81], [0.1, 0.8, 0.9]), colour="C0")
    assert axes.lines == [([0], [0.1]), ([80, 81], [0.8, 0.9])]
    assert axes.labels == ["held-out accuracy", None]

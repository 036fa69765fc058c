"""Progress display of a run: a live table on a terminal, one line per step elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

# (label, metric, format) in display order; * matches any suffix.
COLUMNS = (
    ("reward", "reward/avg_raw_reward", "{:.3f}"),
    ("cross-entropy", "policy/cross_entropy", "{:.3f}"),
    ("pass@n", "reward/avg_pass_at_*", "{:.3f}"),
    ("turns", "generate/avg_num_turns", "{:.2f}"),
    ("eval", "eval/all/avg_score", "{:.3f}"),
    ("tokens/s", "timing/tokens_per_second", "{:,.0f}"),
    ("step s", "timing/step", "{:.1f}"),
    ("generate", "timing/generate", "{:.2f}"),
    ("env", "timing/environment", "{:.2f}"),
    ("batch", "timing/batch", "{:.3f}"),
    ("fwd-bwd", "timing/forward_backward", "{:.2f}"),
    ("sync", "timing/sync", "{:.2f}"),
)
_SHOWN_STEPS = 12


class ProgressDisplay:
    """Shows the phase, the step and the metrics of the last steps.

    Example:
        >>> with ProgressDisplay(total_steps=10, start_step=0) as display:
        ...     display.phase("generate")
        ...     display.step(1, {"reward/avg_raw_reward": 0.5})
    """

    def __init__(
        self, *, total_steps: int, start_step: int, console: Console | None = None
    ) -> None:
        self._console = console or Console(stderr=True)
        self._rows: list[tuple[int, Mapping[str, float]]] = []
        self._total = total_steps
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task("starting", total=total_steps, completed=start_step)
        self._live: Live | None = None

    def __enter__(self) -> ProgressDisplay:  # noqa: D105
        if self._console.is_terminal:
            self._live = Live(self._render(), console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: Any) -> None:  # noqa: D105
        if self._live is not None:
            self._live.stop()
            self._live = None

    def phase(self, name: str) -> None:
        """Show the current phase."""
        self._bar.update(self._task, description=name)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a complete step; missing metrics are left blank."""
        self._bar.update(self._task, completed=step)
        self._rows = [*self._rows, (step, metrics)][-_SHOWN_STEPS:]
        if self._live is not None:
            self._live.update(self._render())
        else:
            cells = [
                f"{label} {cell}"
                for (label, _, _), cell in zip(COLUMNS, _cells(metrics), strict=True)
                if cell
            ]
            self.say(f"step {step}/{self._total}  " + "  ".join(cells))

    def say(self, text: str) -> None:
        """Print a line above the live table."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _render(self) -> Group:
        table = Table(box=None, padding=(0, 1))
        table.add_column("step", justify="right")
        for label, _, _ in COLUMNS:
            table.add_column(label, justify="right")
        for step, metrics in self._rows:
            table.add_row(str(step), *_cells(metrics))
        return Group(table, self._bar)


def _cells(metrics: Mapping[str, float]) -> list[str]:
    """Return one string per column, empty if the metric is missing."""
    cells = []
    for _, pattern, form in COLUMNS:
        stem = pattern.removesuffix("*")
        any_suffix = stem != pattern
        names = [n for n in metrics if n == pattern or (any_suffix and n.startswith(stem))]
        cells.append(form.format(metrics[names[0]]) if names else "")
    return cells

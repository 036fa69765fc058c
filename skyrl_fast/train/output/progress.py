"""Progress display of a run: a live table on a terminal, one line per step elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

from skyrl_fast.config.progress import ProgressColumn, progress_columns

_SHOWN_STEPS = 12
_PADDING = 2  # between two columns of the table
_LOG_WIDTH = 120  # width of a line in a file or a pipe


class ProgressDisplay:
    """Shows the phase, the step and the metrics of the last steps.

    Args:
        columns: those in `trainer.progress`; None: as many with values as fit on the terminal, or
            into a line of a file. Of several policies, each has its columns.
        console: None: standard error.

    Example:
        >>> with ProgressDisplay(total_steps=10, start_step=0) as display:
        ...     display.phase("generate")
        ...     display.step(1, {"reward/avg_raw_reward": 0.5})
    """

    def __init__(
        self,
        *,
        total_steps: int,
        start_step: int,
        columns: list[str] | None = None,
        console: Console | None = None,
    ) -> None:
        self._console = console or Console(stderr=True)
        self._rows: list[tuple[int, Mapping[str, float]]] = []
        self._total = total_steps
        self._columns = progress_columns(columns)
        self._chosen = columns is not None
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
        self.current_phase = "starting"

    def __enter__(self) -> ProgressDisplay:
        if self._console.is_terminal:
            self._live = Live(self._render(), console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def phase(self, name: str) -> None:
        self.current_phase = name
        self._bar.update(self._task, description=name)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a complete step; missing metrics are left blank."""
        self._bar.update(self._task, completed=step)
        # More would not fit on a terminal, and are in the logs.
        self._rows = [*self._rows, (step, metrics)][-_SHOWN_STEPS:]
        if self._live is not None:
            self._live.update(self._render())
        else:
            self.say(self._line(step, metrics))

    def _line(self, step: int, metrics: Mapping[str, float]) -> str:
        line = f"step {step}/{self._total}"
        for column in _of_policies(self._columns, metrics):
            cell = _cell(column, metrics)
            longer = f"{line}  {column.label} {cell}"
            if cell and (self._chosen or len(longer) <= _LOG_WIDTH):
                line = longer
        return line

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _render(self) -> Group:
        table = Table(box=None, padding=(0, _PADDING // 2))
        table.add_column("step", justify="right")
        if self._rows:
            latest = self._rows[-1][1]
        else:
            latest = {}
        columns = _of_policies(self._columns, latest)
        if not self._chosen:
            columns = self._fitting(columns)
        for column in columns:
            table.add_column(column.label, justify="right")
        for step, metrics in self._rows:
            table.add_row(str(step), *(_cell(column, metrics) for column in columns))
        return Group(table, self._bar)

    def _fitting(self, columns: Sequence[ProgressColumn]) -> list[ProgressColumn]:
        left = self._console.width - len(f"step{self._total}") - _PADDING
        fitting = []
        for column in columns:
            cells = [_cell(column, metrics) for _, metrics in self._rows]
            width = max(map(len, (column.label, *cells))) + _PADDING
            if any(cells) and width <= left:
                fitting.append(column)
                left -= width
        return fitting


def _of_policies(
    columns: Sequence[ProgressColumn], metrics: Mapping[str, float]
) -> list[ProgressColumn]:
    """Return the columns, one for each policy where the metric's name begins with theirs."""
    divided: list[ProgressColumn] = []
    for column in columns:
        end = f"/{column.metric}"
        policies = []
        for name in metrics:
            if name.endswith(end):
                policies.append(name.removesuffix(end))
        divided += [
            ProgressColumn(f"{policy} {column.label}", policy + end, column.format)
            for policy in policies
        ] or [column]
    return divided


def _cell(column: ProgressColumn, metrics: Mapping[str, float]) -> str:
    """Return the column's value as text, "" if the metric is missing."""
    stem = column.metric.removesuffix("*")
    if stem != column.metric:
        values = []
        for name, value in metrics.items():
            if name.startswith(stem):
                values.append(value)
    else:
        if stem in metrics:
            values = [metrics[stem]]
        else:
            values = []
    if values:
        return column.format.format(values[0])
    return ""

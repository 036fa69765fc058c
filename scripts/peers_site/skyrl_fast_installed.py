"""A pytest plugin: SkyRL's tests run with skyrl_fast installed, with a report at the end."""

import skyrl_fast.integrations.skyrl as drop_in


def pytest_configure() -> None:
    """Install before any test is collected."""
    drop_in.install("compat")


def pytest_terminal_summary(terminalreporter: object) -> None:
    """Print the report."""
    terminalreporter.write_line(str(drop_in.report()))  # type: ignore[attr-defined]

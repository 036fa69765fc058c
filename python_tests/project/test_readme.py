"""README.md and the docs pages: sizes, and tables that match the package."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import skyrl_fast
import skyrl_fast.train
from scripts import python_api_page, settings_page
from skyrl_fast.config import Config
from skyrl_fast.config.aliases import ALIASES
from skyrl_fast.config.settings import leaves
from skyrl_fast.train.output.metric_table import METRICS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 180


def test_agent_example_is_ten_lines_and_ops_example_fifteen() -> None:
    agent, ops = (
        [line for line in code.splitlines() if line.strip()]
        for code in blocks("README.md", "python")[:2]
    )
    assert len(agent) <= 10, len(agent)
    assert len(ops) <= 17, len(ops)  # two of them are continued lines


def test_reward_of_the_agent_example_reads_numbers_beside_punctuation() -> None:
    names: dict[str, object] = {"__name__": "readme"}
    exec(blocks("README.md", "python")[0], names)
    reward = names["reward"]
    for answer, wanted in (("The answer is 15.", 1), ("**15**", 1), ("150", 0), ("", 0)):
        assert reward(answer, {"sum": "15"}) == wanted, answer  # type: ignore


def test_ops_example_gives_the_advantages_of_its_comment() -> None:
    names: dict[str, object] = {}
    exec(blocks("README.md", "python")[1], names)
    rows = names["advantages"].sum(dim=1) / names["response_mask"].sum(dim=1)  # type: ignore
    assert rows.tolist() == pytest.approx([0.7071, 0.7071, -0.7071], abs=1e-4)
    assert float(names["logits"].grad.abs().sum()) > 0  # type: ignore


def test_settings_pages_are_up_to_date() -> None:
    for page in (settings_page, python_api_page):
        for path, text in page.pages().items():
            assert path.read_text(encoding="utf-8") == text, f"run python -m {page.__name__}"


def rows_of(page: str) -> list[str]:
    """Return the first cells of a page's tables."""
    text = (ROOT / "docs/reference" / page).read_text(encoding="utf-8")
    return re.findall(r"^\| `([^|]*?)`", text, flags=re.MULTILINE)


def test_every_name_of_the_trainer_has_an_entry_with_all_its_arguments() -> None:
    names = [name for section in python_api_page.SECTIONS.values() for name in section]
    assert sorted(names) == sorted(skyrl_fast.train.__all__)
    for name in names:
        value = getattr(skyrl_fast.train, name)
        if dataclasses.is_dataclass(value):
            wanted = {field.name for field in dataclasses.fields(value)}
        elif inspect.isfunction(value):
            wanted = {*inspect.signature(value).parameters}
        else:
            continue
        text = python_api_page.entry(name)
        cells = re.findall(r"^\| (`.*?`) \|", text, flags=re.MULTILINE)
        assert set(re.findall(r"`(\w+)`", " ".join(cells))) == wanted, name


def test_every_setting_metric_and_command_has_an_entry() -> None:
    num_settings = len(list(leaves(Config())))
    assert len(rows_of("settings.md")) == num_settings + len(ALIASES) > 150
    assert len(rows_of("metrics.md")) == len(METRICS) > 100
    page = (ROOT / "docs/reference/commands.md").read_text(encoding="utf-8")
    commands = python_api_page.subparsers()
    assert re.findall(r"^## skyrl-fast (\w+)$", page, flags=re.MULTILINE) == [*commands]
    guides = [path.read_text("utf-8") for path in (ROOT / "docs").rglob("*.md")]
    shown = "\n".join([README, *(text for text in guides if text != page)])
    assert [name for name in commands if f"skyrl-fast {name}" not in shown] == []


def test_api_table_lists_every_public_name() -> None:
    page = (ROOT / "docs/reference/ops_api.md").read_text(encoding="utf-8")
    table = page.split("<!-- api:begin -->")[1].split("<!-- api:end -->")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = set(re.findall(r"`(\w+)`", " ".join(first_cells)))
    # Those of the trainer are on its page.
    assert names | set(skyrl_fast.train.__all__) == set(skyrl_fast.__all__) - {"__version__"}


def test_every_name_of_the_trainer_is_the_same_in_the_package() -> None:
    for name in skyrl_fast.train.__all__:
        assert getattr(skyrl_fast, name) is getattr(skyrl_fast.train, name)


def test_readme_benchmark_table_matches_the_benchmarks_page() -> None:
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    tables = [text.split("<!-- bench:begin -->")[1].split("<!-- bench:end -->")[0].strip()
              for text in (README, page)]  # fmt: skip
    (headlines, machine), (summary, same_machine) = (t.split("\n\n") for t in tables)
    assert machine == same_machine
    cells = {row.split(" | ")[0]: row.strip("|").split("|") for row in summary.splitlines()}
    for row in headlines.splitlines()[2:]:
        work, medium, large = (cell.strip() for cell in row.strip("|").split("|"))
        assert [medium, large] == [cells[f"| {work}"][column].strip() for column in (2, 4)]

"""The report of rules and tests: `make spec`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.spec_report import SPEC, MarkedTests, read_contract, report

ROOT = Path(__file__).resolve().parent.parent


def problems(text: str) -> list[str]:
    return [p.removeprefix("docs/spec.md:") for p in read_contract(text).problems]


def rules(text: str) -> dict[str, str]:
    return {rule.id: rule.text for rule in read_contract(text).rules.values()}


def test_a_rule_is_the_text_back_to_the_tag_before_it() -> None:
    text = (
        "## 2. A\n\nOne and\ntwo. [2.1] Three. [2.7]\n\n"
        "- an item\n  of two lines [2.2]\n1. first [2.3]\n"
    )
    assert rules(text) == {
        "2.1": "One and two.",
        "2.7": "Three.",
        "2.2": "an item of two lines",
        "2.3": "first",
    }
    assert problems(text) == []


def test_a_table_row_is_a_rule_with_its_cells() -> None:
    text = "## 2. A\n\nRows:\n\n| a | b |\n|---|---|\n| c | d [2.1] |\n| e | f |\n"
    assert rules(text) == {"2.1": "c | d"}
    assert problems(text) == ["8: no tag behind: e | f"]


def test_a_tag_behind_a_colon_covers_what_follows() -> None:
    table = "| a | b |\n|---|---|\n| c | d |\n| e | f [2.2] |\n"
    assert problems(f"## 2. A\n\nRows: [2.1]\n\n{table}") == []
    assert problems(f"## 2. A\n\nRows: [2.1]\n\nMore. [2.3]\n\n{table}") == [
        "9: no tag behind: c | d"
    ]
    assert problems("## 2. A\n\nItems: [2.1]\n\n- a\n- b\n") == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("## 2. A\n\nA rule. [2.1] And more.\n", ["3: no tag behind: And more."]),
        ("## 2. A\n\nNothing follows:\n", ["3: no tag behind: Nothing follows:"]),
        ("## 2. A\n\nCode:\n\n```\nx [2.1]\n```\n", ["3: no tag behind: Code:"]),
        ("## 2. A\n\na [2.1]\n\nb [2.1]\n", ["5: [2.1]: line 3 has the same id"]),
        ("## 2. A\n\na [3.1]\n", ["3: [3.1]: stands in section 2"]),
        ("## 2. A\n\n[2.1] a\n", ["3: [2.1]: no text in front of it", "3: no tag behind: a"]),
        ("Before.\n\n## 1. Words\n\nExplained.\n", []),
        ("## 2. A\n\n> Why: because\n> so.\n\n```\nx\n\ny\n```\n", []),
        ("## 2. A\n\na [2.1]\n\n## Sources\n\nNo rule.\n", []),
    ],
)
def test_text_that_is_no_rule_is_found(text: str, found: list[str]) -> None:
    assert problems(text) == found


CONTRACT = read_contract("## 2. A\n\nHeld. [2.1] Free. [2.2]\n\n## 3. B\n\nAlso held. [3.1]\n")
HELD = MarkedTests(by_rule={"2.1": {"python_tests/test_a.py::test_x": 3}, "3.1": {"t": 1}})


def test_report_names_rules_and_tests() -> None:
    text, errors = report(CONTRACT, HELD)
    assert text.splitlines() == [
        "2. A: 1 of 2 rules held",
        "  [2.1] Held.",
        "      test_a.py::test_x x3",
        "  [2.2] Free.",
        "      NO TEST",
        "",
        "3. B: 1 of 1 rules held",
        "  [3.1] Also held.",
        "      t",
    ]
    assert errors == ["[2.2] has no test: Free."]


def test_report_of_one_section_and_of_what_is_missing() -> None:
    assert report(CONTRACT, HELD, section=3)[0].splitlines()[0] == "3. B: 1 of 1 rules held"
    text, errors = report(CONTRACT, HELD, missing=True)
    assert "2.1" not in text and "[2.2] Free." in text
    assert len(errors) == 1


def test_a_mark_that_names_no_rule_is_an_error() -> None:
    marked = MarkedTests(by_rule={**HELD.by_rule, "2.2": {"t": 1}, "9.9": {"test_y": 1}})
    assert report(CONTRACT, marked)[1] == ['spec("9.9") names no rule: test_y']


TESTS = """
import pytest

@pytest.mark.spec("2.1", "2.2")
@pytest.mark.parametrize("n", [1, 2])
def test_two(n): ...

@pytest.mark.slow
@pytest.mark.spec("2.1")
def test_slow(): ...

@pytest.mark.spec(2.1)
def test_badly_marked(): ...
"""
COLLECT = """
import sys
from scripts.spec_report import collect_marks
marked = collect_marks(sys.argv[1:])
print(marked.by_rule)
print(marked.problems)
"""


def test_marks_are_collected_whatever_a_default_run_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "test_them.py").write_text(TESTS)
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    run = subprocess.run(
        [sys.executable, "-c", COLLECT, str(tmp_path)], capture_output=True, text=True, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
    by_rule, found = (eval(line) for line in run.stdout.strip().splitlines()[-2:])
    names = {
        rule: {t.rpartition("::")[2]: n for t, n in of.items()} for rule, of in by_rule.items()
    }
    assert names == {"2.1": {"test_two": 2, "test_slow (slow)": 1}, "2.2": {"test_two": 2}}
    assert any("test_badly_marked: wanted" in p for p in found)
    assert any("test_broken.py: not collected" in p for p in found)


def test_the_contract_is_tagged_throughout() -> None:
    contract = read_contract(SPEC.read_text(encoding="utf-8"))
    assert contract.problems == []
    assert len(contract.rules) > 100


def test_every_rule_has_a_test_and_every_mark_names_a_rule() -> None:
    pytest.importorskip("vllm", reason="tests that cannot be collected hold no rule")
    command = [sys.executable, "scripts/spec_report.py", "--missing"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr

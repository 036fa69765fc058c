"""The report of rules and tests: `make spec`."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.spec_report import SPEC, MarkedTests, read_contract, report

ROOT = Path(__file__).resolve().parents[2]


def problems(text: str) -> list[str]:
    return [p.removeprefix("docs/spec.md:") for p in read_contract(text).problems]


def rules(text: str) -> dict[str, str]:
    return {rule.name: rule.text for rule in read_contract(text).rules.values()}


def test_rule_text_extends_back_to_the_previous_tag() -> None:
    text = (
        "## 2. A\n\nOne and\ntwo. [out.a] Three. [out.g]\n\n"
        "- an item\n  of two lines [out.b]\n1. first [out.c]\n"
    )
    assert rules(text) == {
        "out.a": "One and two.",
        "out.g": "Three.",
        "out.b": "an item of two lines",
        "out.c": "first",
    }
    assert problems(text) == []


def test_table_row_is_a_rule_with_its_cells() -> None:
    text = "## 2. A\n\nRows:\n\n| a | b |\n|---|---|\n| c | d [out.a] |\n| e | f |\n"
    assert rules(text) == {"out.a": "c | d"}
    assert problems(text) == ["8: no tag after: e | f"]


def test_tag_after_a_colon_covers_what_follows() -> None:
    table = "| a | b |\n|---|---|\n| c | d |\n| e | f [out.b] |\n"
    assert problems(f"## 2. A\n\nRows: [out.a]\n\n{table}") == []
    assert problems(f"## 2. A\n\nRows: [out.a]\n\nMore. [out.c]\n\n{table}") == [
        "9: no tag after: c | d"
    ]
    assert problems("## 2. A\n\nItems: [out.a]\n\n- a\n- b\n") == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("## 2. A\n\nA rule. [out.a] And more.\n", ["3: no tag after: And more."]),
        ("## 2. A\n\nNothing follows:\n", ["3: no tag after: Nothing follows:"]),
        ("## 2. A\n\nCode:\n\n```\nx [out.a]\n```\n", ["3: no tag after: Code:"]),
        ("## 2. A\n\na [out.a]\n\nb [out.a]\n", ["5: [out.a]: line 3 has the same name"]),
        (
            "## 2. A\n\nA [link](out.a) and x[out.a].\n",
            ["3: no tag after: A [link](out.a) and x[out.a]."],
        ),
        ("## 2. A\n\n[out.a] a\n", ["3: [out.a]: no text before it", "3: no tag after: a"]),
        ("Before.\n\n## 1. Words\n\nExplained.\n", []),
        ("## 2. A\n\n> Why: because\n> so.\n\n```\nx\n\ny\n```\n", []),
        ("## 2. A\n\na [out.a]\n\n## Sources\n\nNo rule.\n", []),
    ],
)
def test_untagged_text_is_reported(text: str, found: list[str]) -> None:
    assert problems(text) == found


CONTRACT = read_contract(
    "## 2. A\n\nHeld. [out.a] Free. [out.b]\n\n## 3. B\n\nAlso held. [loop.a]\n"
)
HELD = MarkedTests(by_rule={"out.a": {"python_tests/test_a.py::test_x": 3}, "loop.a": {"t": 1}})


def test_report_names_rules_and_tests() -> None:
    text, errors = report(CONTRACT, HELD)
    assert text.splitlines() == [
        "2. A: 1 of 2 rules covered",
        "  [out.a] Held.",
        "      test_a.py::test_x x3",
        "  [out.b] Free.",
        "      NO TEST",
        "",
        "3. B: 1 of 1 rules covered",
        "  [loop.a] Also held.",
        "      t",
    ]
    assert errors == ["[out.b] has no test: Free."]


def test_report_of_one_section_and_of_missing_rules() -> None:
    assert report(CONTRACT, HELD, section=3)[0].splitlines()[0] == "3. B: 1 of 1 rules covered"
    text, errors = report(CONTRACT, HELD, missing=True)
    assert "out.a" not in text and "[out.b] Free." in text
    assert len(errors) == 1


def test_mark_of_an_unknown_rule_is_an_error() -> None:
    marked = MarkedTests(by_rule={**HELD.by_rule, "out.b": {"t": 1}, "no.such": {"test_y": 1}})
    assert report(CONTRACT, marked)[1] == ['spec("no.such") names no rule: test_y']


TESTS = """
import pytest

@pytest.mark.spec("out.a", "out.b")
@pytest.mark.parametrize("n", [1, 2])
def test_two(n): ...

@pytest.mark.slow
@pytest.mark.spec("out.a")
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


def test_marks_of_deselected_tests_are_collected(tmp_path: Path) -> None:
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
    assert names == {"out.a": {"test_two": 2, "test_slow (slow)": 1}, "out.b": {"test_two": 2}}
    assert any("test_badly_marked: expected" in p for p in found)
    assert any("test_broken.py: not collected" in p for p in found)


def test_specification_is_fully_tagged() -> None:
    contract = read_contract(SPEC.read_text(encoding="utf-8"))
    assert contract.problems == []
    assert len(contract.rules) > 100


@pytest.mark.slow
def test_every_rule_has_a_test_and_every_mark_names_a_rule() -> None:
    pytest.importorskip("vllm", reason="tests that cannot be collected hold no rule")
    command = [sys.executable, "scripts/spec_report.py", "--missing"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr

"""Print every rule of docs/spec.md with the tests that cover it; fail on a rule without one.

    python scripts/spec_report.py [--missing] [--section 3]

A rule is the text before a tag such as `[loss.dual-clip]`, back to the previous tag or to the start
of its paragraph, list item or table row. Tests name the rules they cover:
`@pytest.mark.spec("loss.dual-clip")`. Errors are: a rule without a test, a mark that names no rule,
and text of section 2 or later that belongs to no rule. CONTRIBUTING.md says how to tag.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SPEC = ROOT / "docs" / "spec.md"
FIRST_NORMATIVE_SECTION = 2  # section 1 defines terms; it may have rules, but need not
SHOWN_MARKS = ("slow", "gpu", "vllm", "peers")  # shown after a test that is not always run
WIDTH = 100  # of the report
SHORT = 96  # of a text quoted in an error

TAG = re.compile(r"(?<!\w)\[([a-z]+\.[a-z0-9]+(?:-[a-z0-9]+)*)\](?!\()")  # [area.name]
HEADING = re.compile(r"^#+ +(?:(\d+)\. )?(.*)$")
LIST_ITEM = re.compile(r"^(?:[-*]|\d+\.) +")


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of the contract."""

    name: str
    text: str
    section: int
    line: int


@dataclass(frozen=True, slots=True)
class Section:
    """A numbered heading of the contract."""

    number: int
    title: str


@dataclass(slots=True)
class Contract:
    """The rules of docs/spec.md, and the errors in its tags."""

    sections: list[Section] = field(default_factory=list)
    rules: dict[str, Rule] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Block:
    """A paragraph, list item, table row, piece of code, quotation or heading."""

    kind: str
    line: int
    text: str


def read_contract(text: str, name: str = "docs/spec.md") -> Contract:
    """Return the rules of a contract in Markdown, and the errors in its tags.

    Example:
        >>> read_contract("## 2. Output\\n\\nOne entry per row. [output.row]\\n").rules
        {'output.row': Rule(name='output.row', text='One entry per row.', section=2, line=3)}
    """
    contract = Contract()
    section = 0
    lead_in = ""  # "": none; "open": its items need tags; "tagged": they belong to its rule
    blocks = list(_blocks(text))
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if block.kind == "heading":
            lead_in = ""
            found = HEADING.match(block.text)
            if found and found[1]:
                section = int(found[1])
                contract.sections.append(Section(section, found[2]))
            elif block.text.startswith("## "):
                section = 0
            continue
        rest = _read_tags(contract, block, section, name)
        if block.kind in ("code", "quote", "table head") or section < FIRST_NORMATIVE_SECTION:
            continue
        leads = TAG.sub("", block.text).rstrip().endswith(":")
        is_item = block.kind in ("item", "row")
        belongs = is_item and lead_in == "tagged" and not TAG.search(block.text)
        if leads and rest:  # no tag after the colon: each item has a tag
            if following is None or following.kind not in ("item", "row", "table head"):
                contract.problems.append(_untagged(name, block, rest))
        elif rest and not belongs:
            contract.problems.append(_untagged(name, block, rest))
        if leads:
            lead_in = "open" if rest else "tagged"
        elif not is_item:
            lead_in = ""
    return contract


def _read_tags(contract: Contract, block: _Block, section: int, name: str) -> str:
    """Record the rules of a block; return the text after the last tag."""
    if block.kind == "code":
        return ""
    start = 0
    for tag in TAG.finditer(block.text):
        text = LIST_ITEM.sub("", block.text[start : tag.start()].strip(" |"))
        rule = Rule(tag[1], text, section, block.line)
        start = tag.end()
        where = f"{name}:{block.line}: [{rule.name}]"
        if rule.name in contract.rules:
            first = contract.rules[rule.name].line
            contract.problems.append(f"{where}: line {first} has the same name")
        elif not rule.text:
            contract.problems.append(f"{where}: no text before it")
        else:
            contract.rules[rule.name] = rule
    return block.text[start:].strip(" |")


def _untagged(name: str, block: _Block, text: str) -> str:
    return f"{name}:{block.line}: no tag after: {_shorten(text)}"


def _blocks(text: str) -> Iterator[_Block]:
    block: _Block | None = None
    in_code = False
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        kind = _kind(stripped, line, block, in_code)
        if stripped.startswith("```"):
            in_code = not in_code
        if kind == "more":
            assert block is not None
            block.text += " " + stripped.lstrip("> ")
            continue
        if block is not None:
            yield block
        block = None if kind == "blank" else _Block(kind, number, stripped)
    if block is not None:
        yield block


def _kind(stripped: str, line: str, block: _Block | None, in_code: bool) -> str:
    before = block.kind if block is not None else ""
    if in_code or stripped.startswith("```"):
        return "more" if before == "code" else "code"
    if not stripped:
        return "blank"
    if stripped.startswith("#"):
        return "heading"
    if stripped.startswith("|"):
        if before == "table head":
            return "more" if set(stripped) <= set("|-: ") else "row"
        return "row" if before == "row" else "table head"
    if stripped.startswith(">"):
        return "more" if before == "quote" else "quote"
    if LIST_ITEM.match(stripped):
        return "item"
    return "more" if before in ("paragraph", "item", "quote") else "paragraph"


# --- tests -------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class MarkedTests:
    """A pytest plugin that records which tests cover which rules."""

    by_rule: dict[str, dict[str, int]] = field(default_factory=dict)  # test -> its cases
    problems: list[str] = field(default_factory=list)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Record the marks of all tests, including those that a default run deselects."""
        for item in items:
            test = item.nodeid.partition("[")[0]
            marks = [m.name for m in item.iter_markers() if m.name in SHOWN_MARKS]
            shown = " ".join([test, *(f"({name})" for name in sorted(set(marks)))])
            for mark in item.iter_markers("spec"):
                if not mark.args or not all(isinstance(a, str) for a in mark.args) or mark.kwargs:
                    self.problems.append(f'{test}: expected @pytest.mark.spec("loss.gspo", ...)')
                for rule in {a for a in mark.args if isinstance(a, str)}:
                    cases = self.by_rule.setdefault(rule, {})
                    cases[shown] = cases.get(shown, 0) + 1

    def pytest_collectreport(self, report: Any) -> None:
        """Record a skipped or broken module, whose marks are unknown."""
        if report.outcome != "passed":
            self.problems.append(f"{report.nodeid}: not collected: {_shorten(report.longreprtext)}")


def collect_marks(paths: Iterable[str] = ()) -> MarkedTests:
    """Return which tests cover which rules; imports the tests, runs none.

    Args:
        paths: test files or folders; empty: all tests of the project.

    Raises:
        RuntimeError: pytest failed before collecting the tests.
    """
    marked = MarkedTests()
    where = list(paths) or [str(ROOT / "python_tests")]
    settings = ["-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    arguments = ["--collect-only", "-q", "-m", "", *settings, *where]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        status = pytest.main(arguments, plugins=[marked])
    if status != pytest.ExitCode.OK and not marked.problems:
        raise RuntimeError(f"pytest could not collect the tests: {status!r}\n{output.getvalue()}")
    return marked


# --- report ------------------------------------------------------------------------------------


def report(
    contract: Contract, marked: MarkedTests, *, section: int | None = None, missing: bool = False
) -> tuple[str, list[str]]:
    """Return the printed report and the errors.

    Args:
        contract: from `read_contract`.
        marked: from `collect_marks`.
        section: only this one.
        missing: only rules without a test.
    """
    lines: list[str] = []
    errors = [*contract.problems, *marked.problems]
    for part in contract.sections:
        rules = [r for r in contract.rules.values() if r.section == part.number]
        covered = sum(r.name in marked.by_rule for r in rules)
        if section in (None, part.number):
            lines += [f"\n{part.number}. {part.title}: {covered} of {len(rules)} rules covered"]
        for rule in rules:
            tests = marked.by_rule.get(rule.name, {})
            if not tests:
                errors.append(f"[{rule.name}] has no test: {_shorten(rule.text)}")
            if section in (None, part.number) and not (missing and tests):
                lines += _rule_lines(rule, tests)
    for name in sorted(set(marked.by_rule) - set(contract.rules)):
        tests_named = ", ".join(sorted(marked.by_rule[name]))
        errors.append(f'spec("{name}") names no rule: {tests_named}')
    return "\n".join(lines).lstrip("\n"), errors


def _rule_lines(rule: Rule, tests: dict[str, int]) -> list[str]:
    indent = {"initial_indent": "  ", "subsequent_indent": "  "}
    lines = [textwrap.fill(f"[{rule.name}] {rule.text}", WIDTH, **indent)]
    for test, cases in sorted(tests.items()):
        test = test.removeprefix("python_tests/")
        lines.append(f"      {test}" + (f" x{cases}" if cases > 1 else ""))
    return lines if tests else [*lines, "      NO TEST"]


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHORT else text[: SHORT - 3] + "..."


def main() -> int:
    """Print the report; return 1 if there are errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--section", type=int, help="only this section")
    parser.add_argument("--missing", action="store_true", help="only rules without a test")
    options = parser.parse_args()
    contract = read_contract(SPEC.read_text(encoding="utf-8"))
    text, errors = report(
        contract, collect_marks(), section=options.section, missing=options.missing
    )
    print(text)
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    print(f"\n{len(contract.rules)} rules, {len(errors)} errors")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())

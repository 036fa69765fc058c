"""The documentation site: links of its pages, and the list for language models."""

import re
from pathlib import Path

import pytest
import yaml

from scripts import site

TARGETS = {"README.md": "index.md", "docs/guide/a.md": "guide/a.md", "docs/b.md": "b.md"}


@pytest.mark.parametrize(
    ("source", "text", "wanted"),
    [
        ("README.md", "[x](docs/guide/a.md#part)", "[x](guide/a.md#part)"),
        ("docs/guide/a.md", "[x](../b.md) [y](#here)", "[x](../b.md) [y](#here)"),
        ("docs/guide/a.md", "[x](../../README.md)", "[x](../index.md)"),
        ("docs/b.md", "[x](../csrc/core)", "[x](URL/tree/main/csrc/core)"),
        ("docs/b.md", "[x](../LICENSE)", "[x](URL/blob/main/LICENSE)"),
        ("docs/b.md", "[x](https://example.org/a.md)", "[x](https://example.org/a.md)"),
        ("docs/b.md", "```text\n[x](../LICENSE)\n```", "```text\n[x](../LICENSE)\n```"),
    ],
)
def test_links_point_to_pages_of_the_site_or_to_the_repository(
    source: str, text: str, wanted: str
) -> None:
    assert site.relink(text, source, TARGETS, "URL") == wanted


def test_every_page_is_listed_with_its_first_sentence() -> None:
    lines = site.llms_text({"guide/a.md": "# A page\n\nOne [thing](x.md). Another.\n"})
    assert lines.endswith("- [A page](guide/a.html): One thing.\n")


def test_page_without_a_title_is_refused() -> None:
    with pytest.raises(ValueError, match=r"b\.md: expected a heading"):
        site.llms_text({"b.md": "text"})


def test_a_search_finds_guides_and_not_the_design(tmp_path: Path) -> None:
    texts = site.write_pages(tmp_path)
    hidden = {page for page in texts if (tmp_path / page).read_text().startswith("---\nsearch:")}
    assert {page.partition("/")[0] for page in hidden} == {
        "design",
        "spec.md",
        "changelog.md",
        "contributing.md",
    }
    assert "guide/is_it_learning.md" in texts.keys() - hidden


# What people type, and the page that answers it.
SEARCHES = {
    "KL coefficient": "guide/is_it_learning.md",
    "reward flat": "guide/is_it_learning.md",
    "8 GPUs": "guide/clusters.md",
    "thinking": "guide/thinking_models.md",
    "mismatch": "guide/is_it_learning.md",
    "W&B": "guide/training.md",
    "resume": "guide/training.md",
    "telemetry": "guide/security.md",
    "OOM": "guide/training.md",
    "out of memory": "guide/training.md",
    "save model": "guide/training.md",
    "validation": "guide/troubleshooting.md",
    "learning rate": "guide/is_it_learning.md",
    "chat template": "guide/training.md",
    "tool parser": "guide/environments.md",
    "LoRA rank": "guide/training.md",
    "pass@k": "reference/commands.md",
    "entropy": "guide/is_it_learning.md",
    "truncated": "guide/is_it_learning.md",
    "asynchronous staleness": "guide/asynchronous.md",
    "several data sets": "guide/training.md",
    "own environment": "guide/environments.md",
    "custom loss": "guide/custom_algorithms.md",
    "engine starts": "guide/installation.md",
}


def test_pages_have_a_section_with_the_words_that_people_search(tmp_path: Path) -> None:
    """Words only: the order of hits is that of the browser's index, which is not built here."""
    texts = site.write_pages(tmp_path)
    unanswered = []
    for query, page in SEARCHES.items():
        assert not page.startswith(site.UNSEARCHED)
        words = query.lower().split()
        sections = re.split(r"^(?=#+ )", texts[page].lower(), flags=re.MULTILINE)
        if not any(all(word in section for word in words) for section in sections):
            unanswered.append(query)
    assert unanswered == []


def test_all_pages_of_the_repository_have_a_place_and_a_title() -> None:
    targets = site.page_targets()
    assert len(set(targets.values())) == len(targets) > 50
    pages = [page for page in targets if page.endswith(".md")]
    assert all("\n# " in "\n" + (site.ROOT / page).read_text() for page in pages)


def test_navigation_has_every_page_once() -> None:
    def pages(entry: str | list | dict) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        parts = entry if isinstance(entry, list) else entry.values()
        return [page for part in parts for page in pages(part)]

    text = (site.ROOT / "mkdocs.yml").read_text("utf-8").partition("markdown_extensions:")[0]
    targets = [page for page in site.page_targets().values() if page.endswith(".md")]
    assert sorted(pages(yaml.safe_load(text)["nav"])) == sorted(targets)


def test_names_in_tables_stay_in_one_line() -> None:
    text = (site.ROOT / "mkdocs.yml").read_text("utf-8").partition("markdown_extensions:")[0]
    styles = yaml.safe_load(text)["extra_css"]
    assert [site.page_targets()[f"docs/{name}"] for name in styles] == styles
    rules = "".join((site.ROOT / "docs" / name).read_text() for name in styles)
    assert ".md-typeset table code {\n  white-space: nowrap;" in rules

"""The documentation site: links of its pages, and the list for language models."""

import functools
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote_plus

import pytest
import yaml

from scripts import site
from scripts.browser import NoBrowserError, headless_browser

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
    "KL coefficient": "guide/troubleshooting.md",
    "reward flat": "guide/is_it_learning.md",
    "8 GPUs": "guide/clusters.md",
    "thinking": "guide/thinking_models.md",
    "mismatch": "guide/is_it_learning.md",
    "wandb": "guide/troubleshooting.md",
    "resume": "guide/training.md",
    "telemetry": "guide/security.md",
    "OOM": "guide/troubleshooting.md",
    "out of memory": "guide/troubleshooting.md",
    "save model": "guide/troubleshooting.md",
    "validation": "guide/troubleshooting.md",
    "learning rate": "guide/training.md",
    "chat template": "guide/troubleshooting.md",
    "tool parser": "guide/environments.md",
    "LoRA rank": "guide/training.md",
    "pass@k": "reference/commands.md",
    "entropy": "guide/is_it_learning.md",
    "truncated": "guide/is_it_learning.md",
    "asynchronous staleness": "guide/asynchronous.md",
    "several data sets": "guide/training.md",
    "own environment": "guide/environments.md",
    "custom loss": "guide/custom_algorithms.md",
    "jupyter notebook": "guide/troubleshooting.md",
    "tinker": "guide/tinker.md",
    "compaction": "guide/long_agents.md",
    "log wandb": "guide/troubleshooting.md",
    "resume crash": "guide/troubleshooting.md",
    "save final model vllm": "guide/troubleshooting.md",
    "two datasets": "guide/troubleshooting.md",
    "reward model server": "guide/troubleshooting.md",
    "multi-gpu": "guide/troubleshooting.md",
    "reset environment": "guide/troubleshooting.md",
    "system prompt": "guide/troubleshooting.md",
    "4-bit": "guide/troubleshooting.md",
    "QLoRA": "guide/troubleshooting.md",
    "best checkpoint": "guide/troubleshooting.md",
    "checkpoint size": "guide/troubleshooting.md",
    "length penalty": "guide/troubleshooting.md",
    "gradient accumulation": "guide/troubleshooting.md",
    "torch CPU pip": "guide/installation.md",
    "torchvision": "guide/installation.md",
    "IProgress": "guide/troubleshooting.md",
    "examples wheel": "guide/troubleshooting.md",
}
READ_HITS = 3  # pages of an answer that people read


def test_pages_have_a_section_with_the_words_that_people_search(tmp_path: Path) -> None:
    texts = site.write_pages(tmp_path)
    unanswered = []
    for query, page in SEARCHES.items():
        assert not page.startswith(site.UNSEARCHED)
        words = query.lower().split()
        sections = re.split(r"^(?=#+ )", texts[page].lower(), flags=re.MULTILINE)
        if not any(all(word in section for word in words) for section in sections):
            unanswered.append(query)
    assert unanswered == []


@pytest.mark.slow
def test_the_page_that_answers_is_among_the_first_hits() -> None:
    """In the site's own search, in a browser: needs Zensical, which `make site` installs."""
    if not (site.ROOT / "build" / "site-venv").exists():
        pytest.skip("needs Zensical: make site")
    subprocess.run(["make", "site"], cwd=site.ROOT, check=True, capture_output=True)
    late = {}
    with served_folder(site.SITE) as url, open_search(url) as hits:
        for query, page in SEARCHES.items():
            found = hits(query)
            if page.replace(".md", ".html") not in found[:READ_HITS]:
                late[query] = found[: 2 * READ_HITS]
    assert late == {}


@contextmanager
def served_folder(folder: Path) -> Iterator[str]:
    """Yield the address at which a folder is served."""
    handler = functools.partial(QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


OPEN_SHADOWS = """
const attach = Element.prototype.attachShadow;
Element.prototype.attachShadow = function (options) {
    return attach.call(this, {...options, mode: "open"});
};
"""
OF_THE_SEARCH = "links => links.filter(a => a.getRootNode() !== document).map(a => a.href)"


@contextmanager
def open_search(url: str) -> Iterator[Callable[[str], list[str]]]:
    """Yield a function that types a query into the site's search, and returns the pages found."""
    try:
        with headless_browser() as browser:
            page = browser.new_page()
            page.add_init_script(OPEN_SHADOWS)
            page.goto(f"{url}/index.html")
            page.keyboard.press("/")
            box = page.locator("input[type=text], input:not([type])").last
            links = page.locator("li a")

            def hits(query: str) -> list[str]:
                box.fill(query)
                shown = f"h={quote_plus(query)}"
                page.locator(f"li a[href*='{shown}']").first.wait_for(state="attached")
                found = [link.split("?")[0] for link in links.evaluate_all(OF_THE_SEARCH)]
                return list(dict.fromkeys(link.removeprefix(f"{url}/") for link in found))

            yield hits
    except NoBrowserError as error:
        pytest.skip(str(error))


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

"""Build the documentation site from docs/ into site/, offline: make site

README.md becomes the index, and pages of the repository's root are added. Links to files that are
no pages point to the repository. Zensical renders the pages and fails on a link or anchor that does
not exist. site/llms.txt lists the pages for language models, by the convention of that name.

Zensical: it reads MkDocs' configuration, needs no network, checks links itself, and is developed;
mkdocs-material is not any more, and Sphinx would need other links than the repository's pages have.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "build" / "pages"
SITE = ROOT / "site"
ROOT_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "MIGRATION.md": "migration.md",
    "SECURITY.md": "security-policy.md",
}
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")
ASSETS = (".png", ".svg", ".css")
# They name everything, so that a search would find them before the guide that answers.
UNSEARCHED = ("design/", "spec.md", "changelog.md", "contributing.md")
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"


def main() -> None:
    """Write the pages, render them, add llms.txt."""
    pages = write_pages()
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    subprocess.run(command, cwd=ROOT, check=True)
    (SITE / "llms.txt").write_text(llms_text(pages), encoding="utf-8")
    print(f"{len(pages)} pages in {SITE.relative_to(ROOT)}/")


def write_pages(folder: Path = PAGES) -> dict[str, str]:
    """Write all pages into a folder, with links between them; return their texts by path there."""
    shutil.rmtree(folder, ignore_errors=True)
    targets = page_targets()
    base = repository()
    texts = {}
    for source, target in targets.items():
        destination = folder / target
        destination.parent.mkdir(parents=True, exist_ok=True)
        if source.endswith(ASSETS):
            shutil.copy(ROOT / source, destination)
            continue
        text = (ROOT / source).read_text(encoding="utf-8")
        texts[target] = relink(text, source, targets, base)
        is_found = not target.startswith(UNSEARCHED)
        front = "" if is_found else NOT_SEARCHED
        destination.write_text(front + texts[target], encoding="utf-8")
    return texts


def page_targets() -> dict[str, str]:
    """Return the place in the site of every page and picture, by path in the repository."""
    found = sorted(path for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", *ASSETS))
    targets = {name: page for name, page in ROOT_PAGES.items() if (ROOT / name).exists()}
    for path in found:
        targets[path.relative_to(ROOT).as_posix()] = path.relative_to(ROOT / "docs").as_posix()
    return targets


def relink(text: str, source: str, targets: dict[str, str], base: str) -> str:
    """Return a page whose relative links point to the site's pages, or to the repository.

    Code blocks stay as they are.
    """

    def replaced(match: re.Match[str]) -> str:
        path = ((ROOT / source).parent / match[1]).resolve()
        inside = path.relative_to(ROOT).as_posix()
        if inside not in targets:
            return f"{base}/{'tree' if path.is_dir() else 'blob'}/main/{inside}{match[2] or ''}"
        depth = targets[source].count("/")
        return "../" * depth + targets[inside] + (match[2] or "")

    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else LINK.sub(replaced, part) for part in parts)


def llms_text(pages: dict[str, str]) -> str:
    """Return llms.txt: the package in a sentence, then each page with its first sentence."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = ["# skyrl_fast", "", f"> {project['description']}", "", "## Pages", ""]
    for target, text in pages.items():
        title = re.search(r"^# (.+)$", text, flags=re.MULTILINE)
        if title is None:
            raise ValueError(f"{target}: expected a heading `# ...`, got none")
        page = target.removesuffix(".md") + ".html"
        lines.append(f"- [{title[1]}]({page}): {first_sentence(text)}")
    return "\n".join(lines) + "\n"


def first_sentence(text: str) -> str:
    """Return the first sentence of a page's first paragraph, without links."""
    for paragraph in re.split(r"\n\s*\n", text):
        if re.match(r"[A-Z*`]", paragraph):
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
            return re.split(r"(?<=[.:])\s", plain)[0]
    return ""


def repository() -> str:
    """Return the address of the repository, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["urls"]["Homepage"])


if __name__ == "__main__":
    main()

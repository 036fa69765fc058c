"""The documentation: links and anchors resolve, and what it names exists.

Words in backticks are looked up: paths in the repository, `skyrl_fast.x.y` as modules and their
names, everything else that looks like code as words of the sources. Files may move: a path is also
found by its last components.
"""

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = "py|pyi|cpp|h|cu|cuh|md|yaml|json|jsonl|toml|txt|png|js|html|css"
SOURCES = (
    ".py",
    ".pyi",
    ".cpp",
    ".h",
    ".cu",
    ".cuh",
    ".js",
    ".yaml",
    ".toml",
    ".txt",
    ".html",
    ".css",
)

# Names that are not in the sources, and why.
WRITTEN_BY_A_RUN = {
    "runs/router_replay/results.json",
    "step_000012.jsonl",
    "eval_step_000010.jsonl",
    "failure.txt",
}
MATHEMATICS = {"s_j", "n_g", "g_h", "T_j", "dW", "dH", "score_j", "v_old"}
OF_OTHER_PACKAGES = {
    "CUDAExtension",
    "Dataset",
    "RAY_RUNTIME_ENV_HOOK",
    "collect_rollout_details",
    "experts.3.up_proj.weight",
    "gsm8k_dataset.py",
    "gsm8k_multi_turn_dataset.py",
    "no_gc",
    "override_timeout_sec",
    "searchr1_dataset.py",
}
# Pages whose words in backticks are mostly those of others.
NOT_ABOUT_OUR_CODE = (
    "AGENTS.md",
    "CHANGELOG.md",
    "CODE_OF_CONDUCT.md",
    "MIGRATION.md",
    "SECURITY.md",
)
EXCEPTIONS = WRITTEN_BY_A_RUN | MATHEMATICS | OF_OTHER_PACKAGES
FOLDERS = "csrc|skyrl_fast|python_tests|bench|docs|scripts|examples"
WRITTEN = (".json", ".jsonl", ".png", ".html", ".md", ".txt")
IS_PATH = rf"[\w.<>*/-]+\.({SUFFIXES})|({FOLDERS})/[\w.<>*/-]*"


@cache
def tracked() -> list[str]:
    """Return all files that git tracks or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listing.splitlines() if (ROOT / name).is_file()]


@cache
def sources() -> str:
    """Return the text of all sources except this file, which contains names that do not exist."""
    names = [n for n in tracked() if n.endswith(SOURCES) and Path(n).name != Path(__file__).name]
    return "\n".join((ROOT / name).read_text(encoding="utf-8") for name in [*names, "Makefile"])


@cache
def words() -> frozenset[str]:
    """Return all identifiers of the sources."""
    return frozenset(re.findall(r"[A-Za-z_]\w*", sources()))


@cache
def pages() -> list[str]:
    names = [n for n in tracked() if re.fullmatch(r"docs/.*\.md|examples/.*README\.md", n)]
    return ["README.md", "CONTRIBUTING.md", *names]


def prose(page: str) -> str:
    """Return a page without its code blocks."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def slugs(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def exists(path: str) -> bool:
    """Return whether a path, or the end of one, is a file or folder of the repository."""
    pattern = re.compile(
        r"(?:.*/)?" + re.sub(r"\\\*|<op>", r"[^/]*", re.escape(path.rstrip("/"))) + r"(?:/.*)?"
    )
    return any(pattern.fullmatch(name) for name in tracked())


def missing(quoted: str) -> str:
    """Return the part of quoted code that does not exist; "" if all exists or it is not a name."""
    if quoted in EXCEPTIONS:
        return ""
    if re.fullmatch(r"skyrl_fast(\.\w+)+(\(.*\))?", quoted):
        unknown = [part for part in re.findall(r"\w+", quoted.partition("(")[0]) if not known(part)]
        return ", ".join(unknown)
    path = quoted.removesuffix("()")
    braces = re.fullmatch(r"(.*)\{(.*)\}(.*)", path)
    paths = [f"{braces[1]}{part}{braces[3]}" for part in braces[2].split(",")] if braces else [path]
    if all(re.fullmatch(IS_PATH, p) for p in paths):
        return ", ".join(p for p in paths if not exists(p) and not written(p))
    # Code: what is called, assigned or dotted, or has an underscore or a capital letter.
    name = re.fullmatch(r"([A-Za-z_][\w.]*?)(\(.*\)|=.*)?", quoted)
    if name is None or not (name[2] or (len(name[1]) > 3 and re.search(r"[._]|[A-Z]", name[1]))):
        return ""
    return ", ".join(part for part in name[1].split(".") if part and not known(part))


def written(path: str) -> bool:
    """Return whether it is a file written by this package's programs."""
    return path.endswith(WRITTEN) and Path(path).name in sources()


def known(word: str) -> bool:
    return word in words() or word in EXCEPTIONS or exists(f"{word}.py") or exists(word)


def test_no_conflict_of_a_merge_is_left() -> None:
    marks = re.compile(r"^(<{7} |\|{7} |={7}$|>{7} )", flags=re.MULTILINE)
    texts = {name: (ROOT / name).read_bytes() for name in tracked() if (ROOT / name).is_file()}
    assert len(texts) > 500
    assert [n for n, text in texts.items() if marks.search(text.decode("utf-8", "ignore"))] == []


@pytest.mark.parametrize("page", pages())
def test_names_in_backticks_exist(page: str) -> None:
    paragraphs = re.split(r"\n(?=\n|\||#|\s*- )", prose(page))
    spans = [span for text in paragraphs for span in re.findall(r"`([^`]+)`", text)]
    quoted = [" ".join(span.split()) for span in spans]
    wrong = {code: gone for code in quoted if (gone := missing(code))}
    assert not wrong


@cache
def all_tests() -> frozenset[str]:
    """Return all tests as "test_file.py::test_name"."""
    files = [name for name in tracked() if re.fullmatch(r"python_tests/.*/test_\w+\.py", name)]
    return frozenset(
        f"{Path(name).name}::{test}"
        for name in files
        for test in re.findall(
            r"^(?:async )?def (test_\w+)", (ROOT / name).read_text(), re.MULTILINE
        )
    )


@pytest.mark.parametrize("page", pages())
def test_named_tests_exist(page: str) -> None:
    named = re.findall(r"`([^`]*::[^`]*)`", prose(page))
    assert [name for name in named if name.startswith("test_") and name not in all_tests()] == []


@pytest.mark.parametrize("section", ["Sockets", "Processes", "Files"])
def test_each_row_of_the_security_page_names_its_tests(section: str) -> None:
    text = prose("docs/guide/security.md").partition(f"## {section}\n")[2].partition("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 3
    assert [row for row in rows if not re.search(r"`test_\w+\.py::test_\w+`", row)] == []


@pytest.mark.parametrize("page", [*pages(), *NOT_ABOUT_OUR_CODE])
def test_links_and_anchors_resolve(page: str) -> None:
    folder = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http:", "https:")):
            continue
        path, _, anchor = target.partition("#")
        file = (folder / path).resolve() if path else ROOT / page
        assert file.exists(), target
        assert not anchor or anchor in slugs(file), target


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        fenced = re.findall(r"^```.*?^```$", text, flags=re.DOTALL | re.MULTILINE)
        commands = re.findall(r"`(make [^`\n]+)`", text) + "\n".join(fenced).splitlines()
        for target in re.findall(r"^make ([a-z][a-z0-9-]*)", "\n".join(commands), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), (page, target)


def test_missing_name_is_detected() -> None:
    assert missing("no_such_function()") == "no_such_function"
    assert missing("_NO_TABLE") == "_NO_TABLE"
    assert missing("csrc/no_such_file.h") == "csrc/no_such_file.h"
    assert missing("skyrl_fast.no_module_of_ours.x") == "no_module_of_ours"
    assert missing("StepBatch.no_such_method") == "no_such_method"
    assert missing("csrc/<op>/<op>_cpu.cpp") == missing("StepBatch") == missing("a clause") == ""


def messages() -> str:
    """Return the texts of the package's sources, with `…` for what is filled in."""
    found = []
    for path in sorted((ROOT / "skyrl_fast").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else "…" for v in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%(\.\d)?[sdfg]", "…", node.value))
    return "\n".join(found)


def test_every_message_of_the_troubleshooting_page_exists() -> None:
    page = (ROOT / "docs/guide/troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `(.*?)` \|", page, flags=re.M)
    assert len(quoted) > 20
    texts = messages()
    for message in quoted:
        for part in filter(None, map(str.strip, message.split("…"))):
            if len(part) > 6:
                assert part in texts, (message, part)

"""Run SkyRL's tests with and without skyrl_fast, and our tests with SkyRL, verl and TRL.

    python scripts/peers.py [--skyrl TREE] [--venv .venv] [--site FOLDER] [--only suites|ours]
    python scripts/peers.py --bench [--skyrl TREE] ...

TREE is a source tree of SkyRL's, whose tests are run: they are not in SkyRL's packages. Without it
only our tests run, with the packages from the index. These are installed into build/peers, on top
of the environment of `make setup`; openenv in a folder that only its servers import, since it
requires mcp 1, and vLLM mcp 2.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "peers"
SITE = BUILD / "site-packages"  # dill pickles classes of packages by name only under such a path
# Without dependencies: SkyRL's, verl's and TRL's own lists bring GPU builds of torch and vLLM.
SKYRL = "0.4.0" if sys.version_info >= (3, 12) else "0.3.0"  # 0.4.0 needs Python 3.12
PACKAGES = (f"skyrl=={SKYRL}", "verl==0.9.1", "trl==1.16.0", "liger-kernel==0.8.5")
NEEDED = (
    "ray>=2.51", "jaxtyping", "loguru", "tensordict", "torchdata", "omegaconf", "hydra-core",
    "accelerate", "peft", "polars", "datasets", "cloudpathlib", "codetiming", "msgpack", "orjson",
    "pybase64", "zstandard", "func_timeout", "skyrl-gym==0.4.0", "pytest-asyncio",
    # of our tests alone
    "gymnasium", "langchain-openai", "reasoning-gym==0.1.25", "verifiers==0.4.0",
)  # fmt: skip
OPENENV = ("openenv==0.10.0",)
KEEP = ("torch", "numpy", "transformers", "tokenizers", "safetensors", "nvidia", "triton")
SUITES = (
    "tests/train/test_trainer.py", "tests/train/test_trainer_utils.py", "tests/train/generators",
    "tests/train/test_generator_postprocess.py", "tests/train/test_prompt_mini_batch.py",
    "tests/train/test_collation_vectorization_equivalence.py",
    "tests/train/test_async_batch_collation.py", "tests/train/test_fully_async_trainer.py",
    "tests/train/dataset", "tests/train/algorithms", "tests/train/step_wise",
    "tests/train/test_eval.py", "tests/backends/skyrl_train/test_train_batch.py",
    "tests/backends/skyrl_train/utils", "tests/backends/skyrl_train/workers",
)  # fmt: skip
OUTCOMES = ("passed", "failed", "error", "skipped")
# Missing prerequisites of a SkyRL test, by a pattern in its error; the first match counts.
REASONS = (
    (r"OfflineModeIsEnabled|LocalEntryNotFound|HF_HUB_OFFLINE|couldn't connect to|offline mode",
     "downloads a model or data from a hub (HF_HUB_OFFLINE=0 lets it)"),
    (r"No module named '([\w.]+)'", r"imports the package \1, which is not installed"),
    (r"fixture '(\w+)' not found", r"uses a missing fixture: \1"),
    (r"CUDA|NVIDIA|[Nn]o GPU|cuda", "needs a GPU"),
    (r"Can't pickle <class 'MonthDayNano'>",
     "datasets cannot pickle a type of this pyarrow version: both are requirements of SkyRL"),
    (r"Timeout", "exceeded the time limit of a test"),
)  # fmt: skip
SECONDS_PER_TEST = 300  # one of them starts 16 processes


def main() -> None:
    """Set up, run, print both tables; exit with 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--skyrl", type=Path, help="source tree of SkyRL, with its tests")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument(
        "--site", type=Path, help=f"folder of packages; default: {SITE.relative_to(ROOT)}"
    )
    parser.add_argument("--only", choices=("suites", "ours"))
    parser.add_argument(
        "--bench", action="store_true", help="run the bench instead; its options follow"
    )
    args, rest = parser.parse_known_args()
    if rest and not args.bench:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    python = args.venv.absolute() / "bin" / "python"  # the tests run in another folder
    site = args.site or install_packages(python, SITE)
    if args.bench:
        first = [args.skyrl.resolve()] if args.skyrl else []
        command = [str(python), "-m", "bench.skyrl_drop_in", *rest]
        env = environment(site, *first)
        if "OMP_NUM_THREADS" not in os.environ:
            del env["OMP_NUM_THREADS"]  # torch's default number of threads
        sys.exit(subprocess.run(command, cwd=ROOT, env=env).returncode)
    failed = False
    if args.skyrl is None and args.only != "ours":
        print(
            "peers: name a source tree of SkyRL to run its tests: make peers SKYRL=/path/to/SkyRL"
        )
    if args.skyrl is not None and args.only != "ours":
        failed |= not compare_suites(python, site, args.skyrl.resolve())
    if args.only != "suites":
        install(python, BUILD / "openenv", OPENENV)
        failed |= not run_ours(python, site, args.skyrl)
    sys.exit(failed)


def install_packages(python: Path, site: Path) -> Path:
    """Install the imports of SkyRL, verl and TRL into a separate folder, once; return it."""
    if not install(python, site, NEEDED, alone=PACKAGES):
        return site
    for entry in site.iterdir():  # already in the environment, in the versions it needs
        if entry.name.lower().replace("-", "_").split("_")[0].split(".")[0] in KEEP:
            subprocess.run(["rm", "-rf", str(entry)], check=True)
    return site


def install(
    python: Path, site: Path, packages: Sequence[str], *, alone: Sequence[str] = ()
) -> bool:
    """Install packages into a folder, unless it has them; return whether it had not.

    Args:
        alone: those that are installed without their dependencies.
    """
    stamp = site / ".requirements"
    wanted = "\n".join((*alone, *packages))
    if stamp.exists() and stamp.read_text() == wanted:
        return False
    print(f"[peers] installing into {site.relative_to(ROOT)} (a few minutes, once)", flush=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--target", str(site), "--upgrade", *packages], check=True)
    if alone:
        subprocess.run([*pip, "--target", str(site), "--upgrade", "--no-deps", *alone], check=True)
    stamp.write_text(wanted)
    return True


def environment(site: Path, *first: Path) -> dict[str, str]:
    """Return the environment of a run: the folders first, then the packages."""
    path = [*first, ROOT / "scripts" / "peers_site", ROOT, site]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),  # tests that download fail twice
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def compare_suites(python: Path, site: Path, tree: Path) -> bool:
    """Run SkyRL's tests both ways and print both tables; return whether the results are equal."""
    stock = run_suites(python, site, tree, installed=False)
    installed = run_suites(python, site, tree, installed=True)
    print_table("SkyRL's tests, SkyRL alone", stock)
    print_table("SkyRL's tests, with skyrl_fast installed (compat)", installed)
    print_reasons(reasons("stock"), reasons("installed"))
    return are_equal(stock, installed)


def are_equal(stock: dict[str, str], installed: dict[str, str]) -> bool:
    """Print each test whose outcome differs; return whether none does and one passed.

    Results without a test that passed are not equal: the tests were not run.
    """
    others = [test for test in sorted(stock.keys() | installed.keys())
              if stock.get(test) != installed.get(test)]  # fmt: skip
    for test in others:
        print(f"differs: {test}: {stock.get(test)} alone, {installed.get(test)} installed")
    if "passed" not in stock.values():
        print("No test of SkyRL's passed: see the logs.")
        return False
    print("The two tables are equal, test by test." if not others else f"{len(others)} differ.")
    return not others


def run_suites(python: Path, site: Path, tree: Path, *, installed: bool) -> dict[str, str]:
    """Return the outcome of each of SkyRL's tests."""
    name = "installed" if installed else "stock"
    BUILD.mkdir(parents=True, exist_ok=True)
    result, log = BUILD / f"{name}.xml", BUILD / f"{name}.log"
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
    command += [
        "--continue-on-collection-errors",
        "-o",
        "asyncio_mode=auto",
        "--timeout",
        str(SECONDS_PER_TEST),
    ]
    command += ["--timeout-method", "signal", "--junitxml", str(result)]
    command += ["-p", "skyrl_fast_installed"] if installed else []
    command += [suite for suite in SUITES if (tree / suite).exists()]
    print(f"[peers] {name}: SkyRL's tests (log: {log.relative_to(ROOT)})", flush=True)
    start = time.monotonic()
    with log.open("w") as file:
        subprocess.run(
            command, cwd=tree, env=environment(site, tree), stdout=file, stderr=subprocess.STDOUT
        )
    print(f"[peers] {name}: {time.monotonic() - start:.0f} s", flush=True)
    return outcomes(result)


def outcomes(result: Path) -> dict[str, str]:
    """Return test -> outcome from a JUnit file."""
    found: dict[str, str] = {}
    for case in ElementTree.parse(result).getroot().iter("testcase"):
        kinds = [child.tag for child in case]
        outcome = "passed"
        for tag, name in (("failure", "failed"), ("error", "error"), ("skipped", "skipped")):
            if tag in kinds:
                outcome = name
        found[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return found


def reasons(name: str) -> Counter[str]:
    """Return reason -> number of failed tests in the last run of this name."""
    found: Counter[str] = Counter()
    for case in ElementTree.parse(BUILD / f"{name}.xml").getroot().iter("testcase"):
        for child in case:
            if child.tag in ("failure", "error"):
                found[reason(f"{child.get('message') or ''}\n{child.text or ''}")] += 1
    return found


def reason(text: str) -> str:
    """Return the missing prerequisite of a test, else the first line of its error."""
    for pattern, why in REASONS:
        match = re.search(pattern, text)
        if match:
            return match.expand(why)
    first = next((line for line in text.splitlines() if line.strip()), "?")
    return first.strip().replace("|", "/")[:100]


def print_reasons(stock: Counter[str], installed: Counter[str]) -> None:
    """Print the reasons of failures and errors, with counts, both ways."""
    if not stock and not installed:
        return
    print("Why tests failed\n\n| reason | SkyRL alone | installed |\n|---|---:|---:|")
    for why in sorted(stock | installed, key=lambda why: -stock[why]):
        print(f"| {why} | {stock[why]} | {installed[why]} |")
    print(flush=True)


def print_table(title: str, results: dict[str, str]) -> None:
    """Print the number of each outcome by test file."""
    by_file: dict[str, Counter[str]] = {}
    for test, outcome in results.items():
        names = test.split("::")[0].split(".")
        file = ".".join(n for n in names if not n[:1].isupper())
        by_file.setdefault(file.removeprefix("tests."), Counter())[outcome] += 1
    print(f"\n{title}\n\n| file | {' | '.join(OUTCOMES)} |\n|---|{'---:|' * len(OUTCOMES)}")
    for file, counts in by_file.items():
        print(f"| {file} | {' | '.join(str(counts[o]) for o in OUTCOMES)} |")
    total = Counter(results.values())
    print(f"| all | {' | '.join(str(total[o]) for o in OUTCOMES)} |\n", flush=True)


def run_ours(python: Path, site: Path, tree: Path | None) -> bool:
    """Run the tests marked `peers`, with the packages, then with the source tree."""
    good = True
    for place in [None, *([tree.resolve()] if tree else [])]:
        print(f"[peers] our tests with {place or 'the packages of the index'}", flush=True)
        command = [str(python), "-m", "pytest", "-m", "peers", "-q", "-W", "ignore"]
        done = subprocess.run(command, cwd=ROOT, env=environment(site, *([place] if place else [])))
        good &= done.returncode == 0
    return good


if __name__ == "__main__":
    main()

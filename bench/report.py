"""Run the benches and print their tables: `python -m bench.report [--write|--summary] [BENCH ...]`.

One line per group: each contender, its fastest and median time, its median divided by ours.
`--json` reads an earlier run instead. `--write` saves the lines with machine and versions under
bench/results/, one page per CPU model; existing lines of the same machine and versions are kept.
`--summary` also writes the summary between the bench markers of docs/benchmarks.md, and its
headlines between those of README.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections import defaultdict
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
OURS = "skyrl_fast"
PACKAGES = ("skyrl-fast", "torch", "numpy", "trl", "verl", "skyrl")


def main() -> None:
    """Run or read, print, and write if requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("benches", nargs="*", help="benches such as pack or logprob; default: all")
    parser.add_argument("--json", type=Path, help="JSON result of an earlier run")
    parser.add_argument("--write", action="store_true")
    parser.add_argument(
        "--summary", action="store_true", help="as --write, and update docs and README"
    )
    args = parser.parse_args()
    path, failed = (args.json, False) if args.json else run(args.benches)
    report = json.loads(path.read_text())
    groups = by_group(report["benchmarks"])
    times = {name: times_of(rows) for name, rows in groups.items()}
    print(document(machine(report), times))
    if args.write or args.summary:
        times = write(machine(report), times)
    if args.summary:
        cells = speed_ups(times)
        replace_table(ROOT / "docs" / "benchmarks.md", summary(cells), machine(report))
        replace_table(ROOT / "README.md", headlines(cells), machine(report))
    if failed:
        raise SystemExit("a bench failed; its lines are missing from the tables")


def run(benches: list[str]) -> tuple[Path, bool]:
    """Run the named benches under pytest-benchmark; return the JSON, and whether one failed."""
    files = [f"bench/bench_{name}.py" for name in benches]
    files = files or sorted(str(f.relative_to(ROOT)) for f in (ROOT / "bench").glob("bench_*.py"))
    path = ROOT / "build" / "bench.json"
    path.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    command += ["--benchmark-json", str(path), "--benchmark-quiet", "-o", "timeout=1800"]
    done = subprocess.run(command, cwd=ROOT, stdout=sys.stderr)
    return path, done.returncode != 0


def by_group(benchmarks: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the benchmarks by group, groups and contenders in the order they ran."""
    groups = defaultdict(list)
    for benchmark in benchmarks:
        groups[benchmark["group"] or benchmark["name"].split("[")[0]].append(benchmark)
    return dict(groups)


def contender(benchmark: dict[str, Any]) -> str:
    """Return the contender's name: the test's `contender` parameter, else its parameter id."""
    params = benchmark.get("params") or {}
    for key in ("contender", "name", "backend"):
        if key in params:
            return str(params[key])
    return str(benchmark.get("param") or benchmark["name"])


def our_median(rows: list[dict[str, Any]]) -> float | None:
    """Return the median of ours (plain, else its first variant), None in a group without it."""
    ours = [r for r in rows if contender(r).startswith(OURS)]
    ours.sort(key=lambda r: contender(r) != OURS)
    return ours[0]["stats"]["median"] if ours else None


def times_of(rows: list[dict[str, Any]]) -> str:
    """Return one group's times as a table cell."""
    ours = our_median(rows)
    entries = []
    for row in rows:
        stats = row["stats"]
        info = [
            f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in row["extra_info"].items()
        ]
        ratio = [f"{stats['median'] / ours:.2f}"] if ours else []
        entries.append(
            f"{contender(row)}: {stats['min'] * 1e3:.3f}, **{stats['median'] * 1e3:.3f}** "
            f"({'; '.join([*ratio, *info])})"
        )
    return "<br>".join(entries)


HEAD = """| work | contenders: min ms, **median ms** (median / ours; further figures) |
|---|---|"""


def document(machine: str, groups: dict[str, str]) -> str:
    """Return all groups as one page."""
    lines = [f"| {name} | {times} |" for name, times in groups.items()]
    return "\n".join(["# CPU", "", machine, "", HEAD, *lines])


def groups_of(document: str) -> tuple[str, dict[str, str]]:
    """Return the machine and the groups of a saved page."""
    head, lines = document.strip().split(f"\n\n{HEAD}\n")
    cells = (line.strip("| ").split(" | ") for line in lines.splitlines())
    return head.removeprefix("# CPU\n\n"), {name: times for name, times in cells}


# Group names end in a size and a number of threads; the summary has one line for all four of them.
GROUP = re.compile(r"(.*?) (medium|large|1024x32000|4096x151936)( fp32| bf16)? ([12])T")
LARGER = ("large", "4096x151936")
COLUMNS = ((False, 1), (False, 2), (True, 1), (True, 2))  # (larger size, threads)
HEADLINES = (
    "advantage grpo",
    "ppo forward+backward",
    "logprob forward+backward bf16",
    "pipeline",
    "merge lists to tensors",
)


def speed_ups(groups: dict[str, str]) -> dict[str, dict[tuple[bool, int], str]]:
    """Return, by work and column, the speed-up over the fastest alternative as a table cell."""
    cells: dict[str, dict[tuple[bool, int], str]] = defaultdict(dict)
    for name, times in groups.items():
        medians = medians_of(times)
        ours = medians.get(OURS, next((m for c, m in medians.items() if c.startswith(OURS)), None))
        peers = {c: m for c, m in medians.items() if OURS not in c and "floor" not in c}
        if ours is None or not peers:
            continue
        best = min(peers, key=peers.__getitem__)
        details = f"{ours:.3g} ms; {best}"
        if "skyrl" in peers and best != "skyrl" and not best.startswith("skyrl_warm"):
            details += f"; skyrl {peers['skyrl'] / ours:.0f}"  # the baseline of SkyRL users
        parts = GROUP.fullmatch(name)
        work = parts[1] + (parts[3] or "") if parts else name
        column = (parts[2] in LARGER, int(parts[4])) if parts else COLUMNS[-1]
        ratio = peers[best] / ours
        # A loss is not rounded to 1.0.
        digits = 2 if ratio < 1.05 else 1
        cells[work][column] = f"**{ratio:.{digits}f}** ({details})"
    return cells


def summary(cells: dict[str, dict[tuple[bool, int], str]]) -> str:
    """Return the table of all speed-ups, one line per workload."""
    lines = ["| work | medium, 1 thread | medium, 2 threads | large, 1 thread | large, 2 threads |"]
    lines.append("|---|---|---|---|---|")
    for work, by_column in cells.items():
        lines.append(f"| {work} | " + " | ".join(by_column.get(c, "") for c in COLUMNS) + " |")
    return "\n".join(lines)


def headlines(cells: dict[str, dict[tuple[bool, int], str]]) -> str:
    """Return the README's table: selected lines of the summary, with two threads."""
    lines = ["| work | medium | large |", "|---|---|---|"]
    for work in HEADLINES:
        by_column = cells.get(work, {})
        lines.append(
            f"| {work} | {by_column.get((False, 2), '')} | {by_column.get((True, 2), '')} |"
        )
    return "\n".join(lines)


def medians_of(times: str) -> dict[str, float]:
    """Return each contender's median in milliseconds."""
    return {
        name: float(median)
        for name, median in re.findall(r"(?:^|<br>)([^<>]*?): [^,]*, \*\*([\d.]+)\*\*", times)
    }


def machine(report: dict[str, Any]) -> str:
    """Return machine, date and versions in one line."""
    cpu = report["machine_info"].get("cpu", {})
    total = cpu.get("count", "?")
    used = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    cores = f"{total} cores" if used == total else f"{used} of {total} cores"
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    date = datetime.datetime.fromisoformat(report["datetime"]).date()
    return (
        f"{cpu.get('brand_raw', platform.processor())}, {cores}, Python "
        f"{report['machine_info']['python_version']}, {', '.join(versions)}; {date}"
    )


def page_of(machine: str) -> Path:
    """Return the CPU's page: "Intel(R) Xeon(R) Processor, ..." -> cpu-intel-xeon.md."""
    brand = re.sub(r"\(\w+\)|processor|cpu|@.*", " ", machine.split(",")[0].lower())
    return RESULTS / f"cpu-{'-'.join(re.findall(r'[a-z0-9]+', brand)) or 'unknown'}.md"


def write(machine: str, groups: dict[str, str]) -> dict[str, str]:
    """Save the groups; return them together with the kept ones of the page."""
    page = page_of(machine)
    before, kept = groups_of(page.read_text()) if page.exists() else ("", {})
    if before.rpartition(";")[0] == machine.rpartition(";")[0]:  # except the date
        groups = {**kept, **groups}
    page.write_text(document(machine, groups) + "\n")
    return groups


def replace_table(path: Path, table: str, machine: str) -> None:
    """Replace the text between the bench markers of a page."""
    before, rest = path.read_text().split(BEGIN)
    _, after = rest.split(END)
    path.write_text(f"{before}{BEGIN}\n{table}\n\n{machine}\n{END}{after}")


if __name__ == "__main__":
    main()

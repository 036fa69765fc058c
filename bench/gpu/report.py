"""Run GPU benches and write their table.

    python -m bench.gpu.report [--only "logprob 30 %"] [--ours] [--tiny] [--out FOLDER]

Writes bench/results/gpu.json and bench/results/gpu.md with the GPU, driver and versions, and for
each time its share of the floor: the bytes that must move, at the bandwidth of a copy measured in
the same run. `--only` replaces only these groups, so that a full run can be done in parts, as
`make gpu-check` does. `--ours` leaves the others' code out, for first figures.
`--device cpu --tiny` is a smoke test without a GPU and saves nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bench.gpu import cases
from bench.gpu.case import OURS, Case
from bench.gpu.peers import NotInstalledError
from bench.gpu.timing import Ceilings, Stopwatch

RESULTS = Path(__file__).resolve().parent.parent / "results"
PACKAGES = (
    *("torch", "triton", "liger-kernel", "trl", "verl", "flash-attn", "quack-kernels"),
    "cut-cross-entropy",
)
COPY_BYTES = 4 << 30
FAILS = "fails"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="substring of the names of the groups to run")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ours", action="store_true", help="only this package")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for a smoke test")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of gpu.json and gpu.md")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu report: there is no GPU here; nothing was measured")
    saves = options.device == "cuda" and not options.tiny
    report: dict[str, Any] = {}
    size = cases.TINY if options.tiny else cases.FULL
    for report in measured(options.device, size, only=options.only, ours=options.ours):
        if saves:  # after every case: an interrupted run keeps its results
            save(report, options.out)
    if not report:
        sys.exit(f"gpu report: no group's name contains {options.only!r}")
    print(table(report))
    exit_if_ours_failed(report["entries"])


def exit_if_ours_failed(entries: list[dict[str, Any]]) -> None:
    """Exit with the cases of this package that failed, if there are any."""
    failed = [
        f"{e['group']}, {e['contender']}"
        for e in entries
        if e["contender"].startswith(OURS) and e.get("skipped", "").startswith(FAILS)
    ]
    if failed:
        sys.exit("gpu report: ours failed: " + "; ".join(failed))


def save(report: dict[str, Any], folder: Path) -> None:
    """Write the report; keep other groups of the same machine and day."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "gpu.json"
    if path.exists():
        before = json.loads(path.read_text())
        if before["machine"] == report["machine"]:
            groups = {e["group"] for e in report["entries"]}
            kept = [e for e in before["entries"] if e["group"] not in groups]
            report = report | {"entries": kept + report["entries"]}
    path.write_text(json.dumps(report, indent=1) + "\n")
    (folder / "gpu.md").write_text(f"# GPU\n\n{table(report)}\n")


def measured(
    device: str,
    size: cases.Size,
    *,
    only: str = "",
    ours: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[dict[str, Any]]:
    """Yield machine, ceilings and the entries of all cases so far, one case after another."""
    watch = Stopwatch(device, **({} if size.is_measured else {"rounds": 2, "flush_bytes": 1024}))
    ceilings = watch.ceilings(COPY_BYTES if size.is_measured else 4096)
    report: dict[str, Any] = {"machine": machine(device), "ceilings": asdict(ceilings)}
    report["entries"] = []
    for case in cases.all_cases(size, device, dtype, only):
        if ours and not case.contender.startswith(OURS):
            continue
        if device == "cpu" and case.contender.endswith("Triton"):
            continue  # which needs a GPU
        report["entries"].append(entry(case, watch, ceilings))
        yield report


def entry(case: Case, watch: Stopwatch, ceilings: Ceilings) -> dict[str, Any]:
    """Return one case's timing, or the reason why it has none."""
    found: dict[str, Any] = {"group": case.group, "contender": case.contender}
    found["floor_ms"] = ceilings.floor_ms(case.floor_bytes, case.bus_bytes)
    try:
        case.prepare()
        found["first_ms"] = watch.once(case.call)  # with compilation and tuning
        if case.check is not None:
            found["error"] = case.check()
        found |= watch.measure(case.call, case.prepare).as_dict() | case.details
    except NotInstalledError as missing:
        found["skipped"] = f"not installed ({missing})"
    except Exception as failure:  # which must not end the run of the others
        found["skipped"] = f"{FAILS}: {type(failure).__name__}: {str(failure)[:120]}"
    return found


def machine(device: str) -> str:
    """Return GPU, driver and versions in one line."""
    parts = [torch.cuda.get_device_name() if device == "cuda" else "CPU (no measurement)"]
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        parts.append("driver " + subprocess.check_output(query, text=True).split()[0])
    for package in PACKAGES:
        try:
            parts.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join([*parts, str(datetime.date.today())])


def table(report: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    lines = [report["machine"], ""]
    best = report["ceilings"]
    lines.append(
        f"Copy: {best['copy_bytes_per_s'] / 1e9:.0f} GB/s, read and written; to the device: "
        f"{best['bus_bytes_per_s'] / 1e9:.0f} GB/s; a launch: {best['launch_ms'] * 1e3:.0f} us."
    )
    group = None
    for e in report["entries"]:
        if e["group"] != group:
            group = e["group"]
            lines += ["", f"## {group}", ""]
            lines.append(f"Floor: {e['floor_ms']:.3f} ms." if e["floor_ms"] else "")
            lines += ["", "| contender | median ms | p10 | p90 | of floor | extra memory | notes |"]
            lines.append("|---|---:|---:|---:|---:|---:|---|")
        lines.append(line(e))
    return "\n".join(lines)


def line(e: dict[str, Any]) -> str:
    """Return one contender's row of the table."""
    if "skipped" in e:
        return f"| {e['contender']} | | | | | | {e['skipped']} |"
    share = f"{e['floor_ms'] / e['median_ms']:.0%}" if e["floor_ms"] else ""
    notes = []
    if "error" in e:
        notes.append(f"error {e['error']:.1e}")
    if "tokens" in e:
        notes.append(f"{e['tokens']:,} tokens")
    if "flops" in e:
        notes.append(f"{e['flops'] / e['median_ms'] / 1e9:.0f} TFLOP/s")
    if "plan_bytes" in e:
        planned, used = (e[name] / 2**30 for name in ("plan_bytes", "total_bytes"))
        notes.append(f"{used:.1f} GiB in all, by the memory plan at most {planned:.1f}")
    notes.append(f"first call {e['first_ms']:.0f} ms")
    if e["rounds"] == 1:
        notes.append("one round")
    return (
        f"| {e['contender']} | {e['median_ms']:.3f} | {e['p10_ms']:.3f} | {e['p90_ms']:.3f} "
        f"| {share} | {e['peak_bytes'] / 2**20:.1f} MiB | {', '.join(notes)} |"
    )


if __name__ == "__main__":
    main()

"""Plot time and memory over tokens and over vocabulary, from bench/results/gpu.json only.

    python -m bench.gpu.plot [--out bench/results/gpu.png]

Without committed results it prints a message and exits with status 3.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.gpu.report import RESULTS

NO_RESULT = 3  # exit status
GROUP = re.compile(r"^(?P<over>over tokens: )?(?P<work>.*?) (?P<tokens>\d+) x (?P<vocab>\d+) ")

Series = dict[str, list[tuple[int, float, float]]]  # contender -> (x, milliseconds, MiB)


def main() -> None:
    """Read, plot, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS / "gpu.json")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.png")
    options = parser.parse_args()
    if not options.results.exists():
        print(
            f"plot-gpu: there is no result yet ({options.results.name} does not exist): nothing "
            "has been measured on a GPU; make gpu-check writes it"
        )
        sys.exit(NO_RESULT)
    report = json.loads(options.results.read_text())
    draw(report, options.out)
    print(f"plot-gpu: {options.out}")


def series(report: dict[str, Any], work: str, *, over_tokens: bool) -> Series:
    """Return the points of each contender, by number of tokens or by vocabulary."""
    found: Series = defaultdict(list)
    for e in report["entries"]:
        match = GROUP.match(e["group"])
        if match is None or "median_ms" not in e or match["work"] != work:
            continue
        if bool(match["over"]) == over_tokens:
            x = int(match["tokens"] if over_tokens else match["vocab"])
            found[e["contender"]].append((x, e["median_ms"], e["peak_bytes"] / 2**20))
    return {name: sorted(points) for name, points in found.items()}


def draw(report: dict[str, Any], out: Path) -> None:
    """Write four panels: time and memory, over tokens and over vocabulary."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 2, figsize=(12, 8))
    work = "logprob forward + backward"
    for column, over_tokens in enumerate((True, False)):
        lines = series(report, work, over_tokens=over_tokens)
        for row, (index, label) in enumerate(((1, "ms"), (2, "extra memory, MiB"))):
            panel = panels[row][column]
            for name, points in lines.items():
                xs, ys = [p[0] for p in points], [p[index] for p in points]
                panel.plot(
                    xs, ys, marker="o", linewidth=2.5 if name == "skyrl_fast" else 1, label=name
                )
            panel.set_xlabel("tokens" if over_tokens else "vocabulary")
            panel.set_ylabel(label)
            panel.set_yscale("symlog" if index == 2 else "log")
    panels[0][0].legend(fontsize=7)
    figure.suptitle(f"{work}\n{report['machine']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main()

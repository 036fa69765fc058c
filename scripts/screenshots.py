"""Take screenshots for the documentation, with a headless Chromium.

    python scripts/screenshots.py RUN [--out docs/images]

`make screenshots` uses the quickstart's run: its page in the viewer, the progress display replayed
from its metrics, and two pages of the built site, which go to build/screenshots because no page
shows them. For an asynchronous run (make screenshots RUN=...) it takes the screenshot of staleness
and faults, for one of an agent that of a forest of calls. The trajectory shown is the first one in
the second half of the run that failed after several turns in a group with successes.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that this file can be run from any folder

from scripts.browser import NoBrowserError, headless_browser  # noqa: E402
from scripts.site import SITE  # noqa: E402
from skyrl_fast.trajectory_store import read_index  # noqa: E402
from skyrl_fast.viewer.build import build_view  # noqa: E402

SIZE = {"width": 1280, "height": 800}
COLOURS = 256  # of a screenshot: small files, no visible difference
MIN_TURNS = 3
TERMINAL_WIDTH = 100
SHOWN_SHARE = 0.6  # of the run's steps in the progress display: it is in progress
UNLINKED = ROOT / "build/screenshots"

Picture = tuple[Path, str, str, Callable[[Any], None]]  # file, colours, address, preparing action


def main() -> int:
    """Take all screenshots; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images")
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder, headless_browser() as browser:
            for path, scheme, address, act in pictures(options.run, Path(folder), options.out):
                tab = browser.new_page(viewport=SIZE, color_scheme=scheme)
                tab.goto(address)
                act(tab)
                path.parent.mkdir(parents=True, exist_ok=True)
                tab.screenshot(path=path, animations="disabled")
                tab.close()
                shrink(path)
                print(f"{path}: {path.stat().st_size // 1024} KiB")
    except (NoBrowserError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def pictures(run: Path, folder: Path, out: Path) -> list[Picture]:
    """Return the pictures to take; pages that are written for them are in `folder`."""
    page = build_view(run, folder / "view").page.as_uri()
    index = read_index(run)
    if any(entry.staleness for entry in index):
        return [(out / "viewer-asynchronous.png", "light", f"{page}#/charts", show_staleness)]
    if all(entry.env_class == "agent" for entry in index):
        longest = max(range(len(index)), key=lambda number: index[number].turns)
        return [(out / "viewer-forest.png", "light", f"{page}#/{longest}", show_advantage)]
    chosen = f"{page}#/{telling_trajectory(run)}"
    progress = folder / "progress.html"
    progress.write_text(progress_page(run), encoding="utf-8")
    return [
        (out / "viewer-trajectory.png", "light", chosen, show_advantage),
        (out / "viewer-tokens.png", "dark", chosen, show_token),
        (out / "viewer-charts.png", "light", f"{page}#/charts", show_charts),
        (out / "viewer-keys.png", "dark", chosen, show_keys),
        (out / "progress.png", "light", progress.as_uri(), show_terminal),
        (UNLINKED / "site-front.png", "light", site_page("index.html"), show_site),
        (UNLINKED / "site-guide.png", "dark", site_page("guide/first_agent.html"), show_site),
    ]


def site_page(name: str) -> str:
    """Return the address of a page of the built site."""
    if not (SITE / name).exists():
        raise ValueError(f"expected the built site with {name}, got none: run `make site`")
    return (SITE / name).as_uri()


def progress_page(run: Path) -> str:
    """Return the progress display in the middle of a run as an HTML page, with its colours."""
    from rich.console import Console
    from rich.terminal_theme import DIMMED_MONOKAI

    from skyrl_fast.train.output.progress import ProgressDisplay

    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [metrics for metrics in map(json.loads, lines) if "timing/step" in metrics]
    seconds = [0.0]  # of the steps shown so far: the display's clock
    console = Console(
        record=True,
        file=io.StringIO(),
        force_terminal=True,
        width=TERMINAL_WIDTH,
        get_time=lambda: sum(seconds),
    )
    with ProgressDisplay(total_steps=len(steps), start_step=0, console=console) as display:
        for metrics in steps[: round(len(steps) * SHOWN_SHARE)]:
            seconds.append(metrics["timing/step"])
            display.phase("generate")
            display.step(metrics["step"], metrics)
        console.export_text()  # drops the recorded frames: the last one follows
    return console.export_html(theme=DIMMED_MONOKAI)


def telling_trajectory(run: Path) -> int:
    """Return the number of a trajectory that failed after several turns where others succeeded."""
    index = read_index(run)
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    for number, entry in enumerate(index):
        if entry.phase == "train":
            groups[entry.step, entry.uid].append(number)
    half = max(entry.step for entry in index) / 2
    for (step, _), numbers in groups.items():
        rewards = [index[number].reward or 0.0 for number in numbers]
        for number, reward in zip(numbers, rewards, strict=True):
            lost = reward < max(rewards) and index[number].turns >= MIN_TURNS
            if step >= half and lost and sum(r > reward for r in rewards) >= len(rewards) / 2:
                return number
    return 0


def show_advantage(tab: Any) -> None:
    """Colour by advantage, from the top."""
    tab.wait_for_selector("html[data-ready]")
    tab.locator("section.turn").first.wait_for()


def show_token(tab: Any) -> None:
    """Colour by probability, from the second turn, and show the numbers of an unlikely token."""
    show_advantage(tab)
    tab.locator("section.turn").nth(1).wait_for()
    for key in ("2", "n", "n"):
        tab.keyboard.press(key)
    tab.evaluate("document.activeElement.blur()")
    unlikely = tab.locator(".odd5, .odd4")
    if unlikely.count():
        unlikely.last.hover()


def show_charts(tab: Any) -> None:
    """Show all charts that fit."""
    tab.wait_for_selector("html[data-ready]")
    tab.locator("figure svg").first.wait_for()


def show_staleness(tab: Any) -> None:
    """Show three columns of charts, starting with staleness."""
    show_charts(tab)
    tab.set_viewport_size({"width": 1440, "height": 560})
    chart = tab.locator("figure", has=tab.get_by_role("heading", name="Staleness", exact=True))
    chart.evaluate("(chart) => chart.scrollIntoView({ block: 'start' })")


def show_keys(tab: Any) -> None:
    """Open the overlay."""
    show_advantage(tab)
    tab.keyboard.press("?")


def show_terminal(tab: Any) -> None:
    """Show as much as the terminal's text fills."""
    text = tab.locator("code").bounding_box()
    right, bottom = text["x"] + text["width"], text["y"] + text["height"]
    tab.set_viewport_size({"width": round(right + text["x"]), "height": round(bottom + text["y"])})


def show_site(tab: Any) -> None:
    """Show the page from the top."""
    tab.locator("nav a").first.wait_for()


def shrink(path: Path) -> None:
    """Rewrite the picture with a palette."""
    from PIL import Image

    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(
            COLOURS, method=Image.Quantize.MAXCOVERAGE, kmeans=3, dither=Image.Dither.NONE
        )
    small.save(path, optimize=True)


if __name__ == "__main__":
    sys.exit(main())

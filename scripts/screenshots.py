"""Take screenshots of a run's page for the documentation, with a headless Chromium.

    python scripts/screenshots.py RUN [--out docs/images]

`make screenshots` uses the quickstart's run; for an asynchronous run (make screenshots RUN=...) it
takes the screenshot of staleness and faults, for one of an agent that of a forest of calls. The
trajectory shown is the first one in the second half of the run that failed after several turns in a
group with successes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that this file can be run from any folder

from scripts.browser import NoBrowserError, headless_browser  # noqa: E402
from skyrl_fast.trajectory_store import read_index  # noqa: E402
from skyrl_fast.viewer.build import build_view  # noqa: E402

SIZE = {"width": 1280, "height": 800}
COLOURS = 256  # of a screenshot: small files, no visible difference
MIN_TURNS = 3


def main() -> int:
    """Take all screenshots; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory() as folder, headless_browser() as browser:
            page = build_view(options.run, Path(folder) / "view").page.as_uri()
            for name, scheme, place, act in pictures(options.run):
                tab = browser.new_page(viewport=SIZE, color_scheme=scheme)
                tab.goto(page + place)
                tab.wait_for_selector("html[data-ready]")
                act(tab)
                path = options.out / f"{name}.png"
                tab.screenshot(path=path, animations="disabled")
                tab.close()
                shrink(path)
                print(f"{path}: {path.stat().st_size // 1024} KiB")
    except (NoBrowserError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def pictures(run: Path) -> list[tuple[str, str, str, Callable[[Any], None]]]:
    """Return each screenshot's name, colours, place in the page, and preparing action."""
    index = read_index(run)
    if any(entry.staleness for entry in index):
        return [("viewer-asynchronous", "light", "#/charts", show_staleness)]
    if all(entry.env_class == "agent" for entry in index):
        longest = max(range(len(index)), key=lambda number: index[number].turns)
        return [("viewer-forest", "light", f"#/{longest}", show_advantage)]
    chosen = telling_trajectory(run)
    return [
        ("viewer-trajectory", "light", f"#/{chosen}", show_advantage),
        ("viewer-tokens", "dark", f"#/{chosen}", show_token),
        ("viewer-charts", "light", "#/charts", show_charts),
        ("viewer-keys", "dark", f"#/{chosen}", show_keys),
    ]


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
    tab.locator("section.turn").first.wait_for()


def show_token(tab: Any) -> None:
    """Colour by probability, from the second turn, and show the numbers of an unlikely token."""
    tab.locator("section.turn").nth(1).wait_for()
    for key in ("2", "n", "n"):
        tab.keyboard.press(key)
    tab.evaluate("document.activeElement.blur()")
    unlikely = tab.locator(".odd5, .odd4")
    if unlikely.count():
        unlikely.last.hover()


def show_charts(tab: Any) -> None:
    """Show all charts that fit."""
    tab.locator("figure svg").first.wait_for()


def show_staleness(tab: Any) -> None:
    """Show three columns of charts, starting with staleness."""
    tab.set_viewport_size({"width": 1440, "height": 560})
    chart = tab.locator("figure", has=tab.get_by_role("heading", name="Staleness", exact=True))
    chart.evaluate("(chart) => chart.scrollIntoView({ block: 'start' })")


def show_keys(tab: Any) -> None:
    """Open the overlay."""
    tab.locator("section.turn").first.wait_for()
    tab.keyboard.press("?")


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

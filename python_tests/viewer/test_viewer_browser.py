"""The viewer in headless Chromium: hostile text, turns, filters, keys, large runs."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _stored import (
    LONG_MEMBERS,
    MARKUP,
    WordTokenizer,
    batch_of,
    long_record,
    make_step,
    make_trajectory,
    two_turns,
    write_long_run,
    write_run,
)

from scripts.browser import NoBrowserError, headless_browser
from skyrl_fast.rollout.trajectory import OtherCall
from skyrl_fast.trajectory_store.lines import encode_line
from skyrl_fast.trajectory_store.trained import TrainedRows
from skyrl_fast.trajectory_store.writer import TrajectoryWriter
from skyrl_fast.viewer.build import build_view

MANY = 10_000
QUICK_MS = 1000  # an acceptable wait; several times the usual time on two busy cores
PATIENCE_SECONDS = 10
LOADED = "performance.getEntriesByType('resource').filter((e) => /\\d\\.js$/.test(e.name)).length"
Open = Callable[..., Any]

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        with headless_browser() as found:
            yield found
    except NoBrowserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's page; one line contains a lone surrogate, as other programs may write it."""
    run = write_run(tmp_path_factory.mktemp("run"))
    part = run / "trajectories/step_000002.jsonl"
    part.write_bytes(part.read_bytes().replace(b"1 | Ann", b"1 | \\udfff", 1))
    return build_view(run).page


@pytest.fixture
def opened(browser: Any, view: Path) -> Iterator[Open]:
    """Open pages; afterwards assert no dialog, no error, and no request outside the folder."""
    problems: list[str] = []
    pages = []

    def open_page(place: str = "", *, page: Path = view, **options: Any) -> Any:
        tab = browser.new_page(viewport={"width": 1400, "height": 900}, **options)
        pages.append(tab)
        tab.on("pageerror", lambda error: problems.append(f"error: {error}"))
        tab.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
        tab.on("dialog", lambda dialog: (problems.append("dialog"), dialog.dismiss()))
        folder = page.parent.as_uri()
        tab.on("request", lambda r: None if r.url.startswith(folder) else problems.append(r.url))
        tab.goto(page.as_uri() + place)
        tab.wait_for_selector("html[data-ready]")
        return tab

    yield open_page
    for tab in pages:
        assert tab.evaluate("window.hacked") is None
        tab.close()
    assert problems == []


def until(tab: Any, condition: str) -> None:
    """Wait for a JavaScript condition, polled from here: the page's policy forbids eval."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not tab.evaluate(condition):
        assert time.monotonic() < deadline, condition
        time.sleep(0.01)


def show(tab: Any, index: int) -> None:
    tab.evaluate(f"location.hash = '#/{index}'")
    until(tab, f"document.querySelector('#group [aria-current][data-index=\"{index}\"]')")


# --- hostile text -------------------------------------------------------------------------------


@pytest.mark.spec("viewer.static-page", "viewer.data-safety")
def test_hostile_trajectory_is_shown_as_text(opened: Open) -> None:
    tab = opened("#/0")
    body = tab.locator("#body")
    body.locator("section.turn").first.wait_for()
    assert MARKUP in body.inner_text()  # as an observation, and in the metrics
    assert MARKUP[:40] in tab.locator("#list .row").first.inner_text()
    assert MARKUP in body.locator(".tokens").first.inner_text()  # as a token of the response
    assert MARKUP in tab.locator("#run-name").inner_text()
    assert MARKUP[:30] in tab.locator("#filter-stop").inner_text()
    assert "__proto__" in body.locator("dl.metrics").inner_text()
    show(tab, 1)
    body.locator(".failure summary").click()
    failure = body.locator(".failure")
    assert MARKUP in failure.locator(".text").first.inner_text()
    assert MARKUP in failure.locator(".traceback .text").inner_text()
    tab.keyboard.press("c")
    tab.locator("#any-metric option").first.wait_for(state="attached")
    names = tab.locator("#any-metric option").all_inner_texts()
    tab.select_option("#any-metric", index=next(i for i, n in enumerate(names) if MARKUP in n))
    assert MARKUP in tab.locator(".any h3").inner_text()
    made = "img, iframe, object, embed, form:not(#filters), a:not(.skip), b, svg script, [onerror]"
    assert tab.locator(made).count() == 0
    assert tab.evaluate("Object.keys(Object.prototype).length + Object.keys({}).length") == 0


@pytest.mark.spec("viewer.text-safety")
def test_invisible_characters_are_shown_as_code_points(opened: Open) -> None:
    tab = opened("#/0")
    observed = tab.locator("#body .said.env .text").first
    chips = observed.locator(".unseen").all_inner_texts()
    assert chips == [
        *("U+202E", "U+2066", "U+200B", "U+2028", "U+2029", "U+001B", "U+0000"),
        *("U+007F", "U+E0041"),
    ]
    assert (
        observed.locator(".unseen").first.get_attribute("title") == "U+202E right-to-left override"
    )
    assert "\\ud800" in observed.inner_text()
    tokens = tab.locator("#body .tokens").first
    assert "👩\u200d👩\u200d👧" in tokens.inner_text()  # one emoji, with its joiners
    assert tokens.locator(".tok").nth(3).locator(".unseen").inner_text() == "U+202E"
    raw = tab.evaluate("document.body.innerText")
    assert not set("\u202e\u2066\u2028\u2029\x00\x1b") & set(raw)
    show(tab, 12)
    assert tab.locator("#body .said.env .unseen").first.inner_text() == "U+DFFF"


def test_text_stays_inside_its_block(opened: Open) -> None:
    tab = opened("#/0")
    for selector in (".text", ".who", ".head h2", "dl.metrics dd"):
        style = f"getComputedStyle(document.querySelector('{selector}')).unicodeBidi"
        assert tab.evaluate(style) == "isolate", selector
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tab.evaluate(
        "byId = document.getElementById('body'), byId.scrollWidth <= byId.clientWidth"
    )


@pytest.mark.spec("viewer.long-text")
def test_huge_line_is_shown_in_parts(opened: Open) -> None:
    tab = opened("#/0")
    observed = tab.locator("#body .said.env .text").first
    assert observed.inner_text().count("x") < 5000
    for _ in range(2):  # the rest of the first item, then the second item
        observed.locator("button.more").click()
    until(tab, "!document.querySelector('#body .said.env .text button.more')")
    assert observed.inner_text().count("x") >= 30_000


@pytest.mark.spec("viewer.long-text", "viewer.scale")
def test_long_trajectory_is_loaded_as_it_is_read(
    opened: Open, tmp_path_factory: pytest.TempPathFactory
) -> None:
    page = build_view(write_long_run(tmp_path_factory.mktemp("long"))).page
    tab = opened("#/5", page=page)
    turns = tab.locator("#body section.turn")
    turns.first.locator(".tok").first.wait_for()
    assert tab.locator("#group button").count() == LONG_MEMBERS
    tab.locator('#group .preview:text("5<1")').wait_for()
    assert tab.evaluate(LOADED) <= 4  # heads, previews, and two of tens of scripts of items
    tab.evaluate("document.querySelectorAll('section.turn')[3].scrollIntoView()")
    until(tab, "document.querySelectorAll('section.turn.pending').length === 0")
    second = turns.nth(1).locator(".tokens")
    for left in (4000, 1000):
        second.get_by_role("button", name=f"{left:,} more tokens").click()
    until(tab, "document.querySelectorAll('section.turn')[1].querySelectorAll('.tok').length > 6e3")
    record = long_record(5)
    texts = second.locator(".tok").evaluate_all("spans => spans.map((span) => span.textContent)")
    assert "".join(texts).replace("↵", "") == record["turns"][1]["response"]
    assert second.locator(".tok").nth(6998).get_attribute("class") == "tok plain"
    second.locator(".tok").nth(6999).hover()
    assert tab.locator("#token").inner_text().startswith('“ "日” · id 6999 · trained')
    context = turns.nth(1).locator(".context")
    context.locator("summary").click()
    for _ in range(3):
        context.locator("button.more").click()
        until(tab, "!document.querySelector('.context button.more:disabled')")
    assert context.locator(".text").inner_text().count("context 1") == 9000
    assert context.locator("button.more").count() == 0


# --- reading ------------------------------------------------------------------------------------


@pytest.mark.spec("viewer.turns")
def test_trajectory_is_shown_turn_by_turn(opened: Open) -> None:
    tab = opened("#/4")
    turns = tab.locator("#body section.turn")
    assert turns.count() == 2
    first, second = turns.nth(0), turns.nth(1)
    assert first.locator("summary").inner_text() == "prompt: 2 tokens"
    assert first.locator(".context .text").inner_text() == "look at"
    assert first.locator(".tokens").inner_text().split() == ["look", "at", "the", "table", "</sql>"]
    assert first.locator(".env .text").inner_text() == "id | name\n1 | Ann"
    assert second.locator("summary").inner_text() == "context: 8 tokens as before, 2 new"
    assert "reward 1" in second.locator("header").inner_text()
    attributes = tab.locator("dl.attributes").inner_text()
    assert "advantage\n1" in attributes
    assert "ended by\nstop" in attributes and "step\n1" in attributes
    show(tab, 6)
    summary = turns.nth(1).locator("summary").inner_text()
    assert summary == "context: 0 tokens as before, 1 new; 8 were dropped or rewritten"


@pytest.mark.spec("viewer.other-calls")
def test_calls_that_are_not_trained_are_between_the_turns(opened: Open, tmp_path: Path) -> None:
    calls = [
        OtherCall("judge", MARKUP, "good", before_step=1, seconds=0.5),
        OtherCall("titles", "", "a title", before_step=2, seconds=0.0),
    ]
    writer = TrajectoryWriter(tmp_path / "trajectories", WordTokenizer(), last_step=0)
    writer.write(1, "eval", [two_turns("a", 0, 1.0, other_calls=calls)])
    tab = opened("#/0", page=build_view(tmp_path).page)
    tab.locator("#body section.turn .tok").first.wait_for()
    parts = tab.locator("#body > section.turn, #body > details").evaluate_all(
        "parts => parts.map((part) => part.tagName)"
    )
    assert parts == ["SECTION", "DETAILS", "SECTION", "DETAILS"]
    judge = tab.locator("details.other").first
    assert judge.locator("summary").inner_text() == "not trained: judge · 500 ms"
    judge.locator("summary").click()
    until(tab, "document.querySelectorAll('details.other .text').length === 2")
    assert judge.locator(".text").nth(1).inner_text() == "good"


@pytest.mark.spec("viewer.forest")
def test_calls_are_drawn_as_a_forest(opened: Open, tmp_path: Path) -> None:
    steps = [
        make_step([10], [20]),
        make_step([11], [21]),  # another conversation
        make_step([10, 20, 30], [22]),
        make_step([10, 20, 31], [23], loss_mask=[0]),  # a branch, not trained
    ]
    judge = [OtherCall("judge", MARKUP, "good", before_step=2, seconds=0.5)]
    trajectories = [
        make_trajectory("a", 0, steps, other_calls=judge),
        two_turns("a", 1, 1.0),
        make_trajectory("a", 2, steps[:1]),
    ]
    writer = TrajectoryWriter(tmp_path / "trajectories", WordTokenizer(), last_step=0)
    writer.write(
        1, "train", trajectories, trained=[TrainedRows(trajectories, batch_of(trajectories))]
    )
    tab = opened("#/0", page=build_view(tmp_path).page)
    forest = tab.locator("#forest")
    summary = "4 calls, 1 fork, 1 new conversation, 1 call of other models"
    assert forest.locator(".trees svg").get_attribute("aria-label") == summary
    calls = forest.locator(".trees circle")
    classes = calls.evaluate_all("all => all.map((one) => one.getAttribute('class'))")
    assert classes == ["call trained here", "call trained", "call trained", "call"]
    rows = calls.evaluate_all("all => all.map((one) => Number(one.getAttribute('cy')))")
    assert rows[0] == rows[2] < rows[1] == rows[3]
    assert forest.locator(".trees path").count() == 2
    assert forest.locator(".trees rect.other title").text_content() == "not trained: judge"
    headers = tab.locator("#body section.turn header").all_inner_texts()
    assert "new conversation" in headers[1] and "continues turn 1" in headers[3]
    calls.nth(3).click()
    assert tab.evaluate("document.activeElement.getAttribute('aria-label')") == "Turn 4 of 4"
    until(tab, "document.querySelectorAll('#forest .here').length === 1")
    show(tab, 1)
    assert forest.locator("p span").first.inner_text() == "2 calls in a line"
    show(tab, 2)
    assert forest.is_hidden()


@pytest.mark.spec("viewer.summaries")
def test_a_context_after_a_summary_has_a_lane_of_its_own(opened: Open, tmp_path: Path) -> None:
    steps = [
        make_step([10, 11], [20]),
        make_step([10, 11, 20, 30], [21], kind="summarise"),
        make_step([10, 12], [22]),
        make_step([10, 12, 22, 31], [23], kind="summarise"),
        make_step([10, 13], [24]),
    ]
    trajectories = [make_trajectory("a", 0, steps), two_turns("a", 1, 1.0)]
    writer = TrajectoryWriter(tmp_path / "trajectories", WordTokenizer(), last_step=0)
    writer.write(
        1, "train", trajectories, trained=[TrainedRows(trajectories, batch_of(trajectories))]
    )
    tab = opened("#/0", page=build_view(tmp_path).page)
    forest = tab.locator("#forest")
    label = forest.locator(".trees svg").get_attribute("aria-label")
    assert label == "5 calls, 2 replaced contexts"
    calls = forest.locator(".trees circle")
    rows = calls.evaluate_all("all => all.map((one) => Number(one.getAttribute('cy')))")
    assert rows[0] == rows[1] < rows[2] == rows[3] < rows[4]
    classes = calls.evaluate_all("all => all.map((one) => one.getAttribute('class'))")
    assert [name.split()[2:] for name in classes][1] == ["summary"]
    assert forest.locator(".trees path.replaces").count() == 2
    assert "summary, with which the next context begins" in forest.inner_text()
    headers = tab.locator("#body section.turn header").all_inner_texts()
    assert "summary" in headers[1] and "summary" not in headers[0]
    assert "begins with the summary of turn 2" in headers[2]
    show(tab, 1)
    assert forest.locator("p span").first.inner_text() == "2 calls in a line"


@pytest.mark.spec("viewer.token-colors")
def test_trained_tokens_are_coloured_by_value(opened: Open) -> None:
    tab = opened("#/4")
    tokens = tab.locator("#body .tokens").first.locator(".tok")
    tokens.first.wait_for()

    def classes() -> list[str]:
        return [
            name.replace("tok", "").strip()
            for name in tokens.evaluate_all("spans => spans.map((span) => span.className)")
        ]

    assert classes() == ["pos5"] * 5 + ["plain"]
    tab.keyboard.press("2")  # engine: -0.25, -0.5, ...: p 0.78, 0.61, 0.47, 0.37, 0.29
    assert classes() == ["odd1", "odd1", "odd2", "odd2", "odd2", "plain"]
    tab.keyboard.press("3")  # less likely by the trainer, by up to 0.2
    assert {name[:3] for name in classes()[:5]} == {"neg"} and classes()[5] == "plain"
    assert "\u22120.2" in tab.locator("#legend").inner_text()
    tab.keyboard.press("0")
    assert classes() == [""] * 5 + ["plain"]
    show(tab, 5)  # a failed trajectory: no token was trained
    tab.keyboard.press("1")
    assert classes() == ["plain"] * 6
    show(tab, 26)  # step 3, sampled two updates earlier
    tab.keyboard.press("4")
    assert classes() == ["odd2", *["odd1"] * 4, "plain"]  # updated after its first token
    assert "staleness\n2 updates" in tab.locator("dl.attributes").inner_text()


def test_token_values_are_shown_for_pointer_and_keys(opened: Open) -> None:
    tab = opened("#/4")
    block = tab.locator("#body .tokens").first
    block.locator(".tok").nth(1).hover()
    shown = tab.locator("#token").inner_text()
    assert shown.startswith(
        "“ at” · id 3 · trained · advantage 1 · engine \u22120.5 (p 0.61) · trainer"
    )
    block.focus()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowRight")
    assert block.locator(".here").inner_text() == " the"
    assert tab.locator("#spoken").inner_text().startswith("“ the” · id 4")


@pytest.mark.spec("viewer.group")
def test_group_is_listed_next_to_the_trajectory(opened: Open) -> None:
    tab = opened("#/5")
    others = tab.locator("#group button")
    assert others.count() == 4
    assert "4 trajectories of this prompt" in tab.locator("#group").inner_text()
    assert others.nth(1).get_attribute("aria-current") == "true"
    assert "failed" in others.nth(1).inner_text()
    assert "users , <sql>" in others.nth(0).inner_text()  # its last response
    others.nth(3).click()
    until(tab, "location.hash === '#/7'")
    tab.locator("#body").click(position={"x": 5, "y": 5})
    tab.keyboard.press("[")
    until(tab, "location.hash === '#/6'")
    tab.keyboard.press("]")
    tab.keyboard.press("]")  # the last one remains
    until(tab, "location.hash === '#/7'")


def test_page_opens_on_the_first_trained_trajectory_and_not_scrolled(
    opened: Open, tmp_path: Path
) -> None:
    writer = TrajectoryWriter(tmp_path / "run/trajectories", WordTokenizer(["a"]), last_step=-1)
    writer.write(0, "eval", [make_trajectory("p", 0, [make_step([0], [0])])])
    trained = [make_trajectory("p", number, [make_step([0], [0])]) for number in range(40)]
    batch = batch_of(trained)
    writer.write(1, "train", trained, trained=[TrainedRows(trained, batch)])
    page = build_view(tmp_path / "run").page
    tab = opened(page=page)
    until(tab, "location.hash === '#/1'")
    tab.set_viewport_size({"width": 390, "height": 800})
    show(tab, 40)  # the last of a group whose list is longer than the screen
    tab.wait_for_timeout(200)
    assert tab.evaluate("scrollY") == 0


@pytest.mark.spec("viewer.failures")
def test_traceback_of_a_failure_is_folded(opened: Open) -> None:
    tab = opened("#/5")
    failure = tab.locator("#body .failure")
    failure.locator("summary").wait_for()
    assert failure.locator(".text").first.inner_text() == "the database is gone"
    assert not failure.locator(".traceback .text").is_visible()
    failure.locator("summary").click()
    assert "return 1 / 0" in failure.locator(".traceback .text").inner_text()
    show(tab, 4)  # it did not fail
    assert tab.locator("#body .failure").count() == 0


def test_group_mean_is_without_failed_trajectories(opened: Open) -> None:
    tab = opened("#/5")
    note = tab.locator("#group .note").inner_text()
    assert note.endswith("without 1 failed"), note


@pytest.mark.parametrize(("longest", "is_named"), [(8, True), (1, False)])
def test_a_prompt_that_was_too_long_is_named(
    longest: int, is_named: bool, opened: Open, tmp_path: Path
) -> None:
    one = make_trajectory("p", 0, [make_step([0], [0])])
    one.stop_reason = one.steps[-1].stop_reason = "length"
    writer = TrajectoryWriter(tmp_path / "run/trajectories", WordTokenizer(["a"]), last_step=-1)
    writer.write(0, "eval", [one])
    sampling = {"max_generate_length": longest}
    config = {"trainer": {"run_name": "r"}, "generator": {"sampling_params": sampling}}
    (tmp_path / "run/config.json").write_text(json.dumps(config))
    tab = opened("#/0", page=build_view(tmp_path / "run").page)
    until(tab, "document.querySelector('dl.attributes')")
    attributes = tab.locator("dl.attributes").inner_text()
    assert ("prompt too long (generator.max_input_length)" in attributes) is is_named


# --- search -------------------------------------------------------------------------------------


def found(tab: Any, number: int) -> None:
    until(tab, f"document.getElementById('found').textContent === '{number} of 74 trajectories'")


@pytest.mark.spec("viewer.filters")
def test_filters_and_sorting(opened: Open) -> None:
    tab = opened()
    found(tab, 74)
    tab.select_option("#filter-phase", label="eval")
    found(tab, 2)
    tab.keyboard.press("Escape")
    tab.keyboard.press("x")
    found(tab, 74)
    tab.select_option("#filter-failure", label="failed")
    found(tab, 18)
    tab.select_option("#filter-stop", label="env_error")
    found(tab, 17)
    tab.get_by_role("button", name="clear").click()
    tab.fill("#filter-stepFrom", "2")
    tab.fill("#filter-stepTo", "3")
    found(tab, 24)
    tab.fill("#filter-rewardFrom", "0.5")
    found(tab, 12)  # a failed trajectory has reward 0
    tab.keyboard.press("Escape")
    tab.keyboard.press("/")
    tab.keyboard.type("Prompt 30")
    found(tab, 6)
    assert tab.locator("#list .row").count() == 6
    tab.get_by_role("button", name="clear").click()
    tab.select_option("#filter-sort", label="turns")
    found(tab, 74)
    until(tab, "document.querySelector('#list .row .how').textContent.includes('1 turn')")
    tab.locator("#filters button").first.click()
    until(tab, "document.querySelector('#list .row .how').textContent.includes('2 turns')")


@pytest.mark.spec("viewer.keys")
def test_everything_is_reachable_by_keys(opened: Open) -> None:
    tab = opened()
    until(tab, "location.hash === '#/0'")
    tab.keyboard.press("j")
    until(tab, "location.hash === '#/1'")
    tab.keyboard.press("k")
    until(tab, "location.hash === '#/0'")
    tab.focus("#list")
    tab.keyboard.press("End")
    until(tab, "location.hash === '#/73'")
    assert tab.locator("#list").get_attribute("aria-activedescendant") == "row-73"
    assert tab.locator("#row-73").get_attribute("aria-posinset") == "74"
    show(tab, 4)
    for key, turn in (("n", 1), ("n", 2), ("n", 2), ("p", 1)):
        tab.keyboard.press(key)
        focused = tab.evaluate("document.activeElement.getAttribute('aria-label')")
        assert focused == f"Turn {turn} of 2"
    tab.keyboard.press("?")
    dialog = tab.locator("dialog[open]")
    assert "next, previous trajectory of the list" in dialog.inner_text()
    tab.keyboard.press("j")  # ignored while the overlay is open
    tab.keyboard.press("Escape")
    assert tab.locator("dialog[open]").count() == 0
    assert tab.evaluate("location.hash") == "#/4"
    tab.keyboard.press("/")
    tab.keyboard.type("jk2t")  # typed into the field, not run as keys
    assert tab.input_value("#filter-uid") == "jk2t"
    assert tab.evaluate("document.documentElement.dataset.theme") is None
    tab.keyboard.press("Escape")
    tab.keyboard.press("c")
    assert tab.locator("#tab-charts").get_attribute("aria-selected") == "true"
    tab.locator("figure svg").first.focus()
    tab.keyboard.press("End")
    assert tab.locator("figure .readout").first.inner_text() == "step 6: training 1"
    tab.keyboard.press("Enter")
    found(tab, 12)


@pytest.mark.spec("viewer.keys")
def test_controls_have_accessible_names(opened: Open) -> None:
    tab = opened("#/4")
    tab.keyboard.press("c")
    tab.locator("figure svg").first.wait_for()
    unnamed = tab.evaluate(
        """() => [...document.querySelectorAll('button, input, select, [role], svg[tabindex]')]
        .filter((e) => !(e.getAttribute('aria-label') || e.getAttribute('aria-labelledby')
          || e.title || e.textContent.trim() || (e.labels && e.labels.length) || e.placeholder
          || ['presentation', 'alert', 'status'].includes(e.getAttribute('role'))))
        .map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert unnamed == []
    label = tab.locator("figure svg").first.get_attribute("aria-label")
    assert label == "Reward. training: from 0.167 to 1"
    tab.locator("figure details summary").first.click()
    tab.locator("figure td").first.wait_for()
    cells = tab.locator("figure").first.locator("td").all_inner_texts()
    assert cells == ["0.167", "0.333", "0.5", "0.667", "0.833", "1"]


@pytest.mark.spec("viewer.charts")
def test_charts_of_the_run(opened: Open) -> None:
    tab = opened("#/charts")
    tab.locator("figure").first.wait_for()
    titles = tab.locator("figure h3").all_inner_texts()
    for title in ("Reward", "Where the time went", "How trajectories ended", "Staleness"):
        assert title in titles
    faults = tab.locator("figure", has_text="Faults").locator("svg").get_attribute("aria-label")
    assert faults == "Faults. environments failed: from 1 to 6"  # no faults that did not occur
    staleness = tab.locator("figure", has_text="Staleness")
    staleness.locator("summary").click()
    staleness.locator("td").first.wait_for()
    rows = staleness.locator("tbody tr").all_inner_texts()
    assert rows == ["0\t48", "1\t12", "2\t12"]  # of samples 1 and 2, from step 3 on


@pytest.mark.spec("viewer.dark-mode")
def test_light_and_dark(opened: Open) -> None:
    sheet = "getComputedStyle(document.querySelector('.top')).backgroundColor"
    dark = opened(color_scheme="dark")
    assert dark.evaluate(sheet) == "rgb(23, 27, 33)"
    dark.keyboard.press("t")
    assert dark.evaluate(sheet) == "rgb(255, 255, 255)"
    light = opened(color_scheme="light")
    assert light.evaluate(sheet) == "rgb(255, 255, 255)"


# --- large runs ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large_view(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """10,000 trajectories: the lines of a small run, repeated with other uids and steps."""
    source = write_run(tmp_path_factory.mktemp("small"), steps=3, groups=5)
    lines = (source / "trajectories/step_000003.jsonl").read_text().split("\n")[:-1]
    records = [json.loads(line) for line in lines]
    for record in records:  # as long as real ones
        tokens, turn = record["tokens"][0], record["turns"][0]
        for name, values in tokens.items():
            if isinstance(values, list) and name != "prompt_token_ids":
                tokens[name] = values * 40
        width = len(turn["response"]) + 1
        ends = tokens["response_ends"][: len(tokens["response_ends"]) // 40]
        tokens["response_ends"] = [end + width * k for k in range(40) for end in ends]
        turn["response"] = (turn["response"] + " ") * 40
    folder = tmp_path_factory.mktemp("large") / "trajectories"
    folder.mkdir()
    for step in range(1, MANY // 20 + 1):
        with (folder / f"step_{step:06d}.jsonl").open("w") as file:
            for record in records:
                uid = f"{record['uid']} of {step}"
                file.write(encode_line({**record, "step": step, "uid": uid}))
    return build_view(folder.parent).page


def timed(tab: Any, action: str, until: str) -> float:
    """Return the milliseconds from an action to the next frame in which a condition holds."""
    result = tab.evaluate(
        f"""() => new Promise((resolve) => {{
            const started = performance.now();
            {action};
            const look = () => ({until}) ? resolve(performance.now() - started)
                : requestAnimationFrame(look);
            requestAnimationFrame(look);
        }})"""
    )
    return float(result)


@pytest.mark.slow
@pytest.mark.alone  # its limits are milliseconds
@pytest.mark.spec("viewer.scale")
def test_page_is_fast_with_ten_thousand_trajectories(
    opened: Open, large_view: Path, record_property: Callable[[str, object], None]
) -> None:
    started = time.perf_counter()
    tab = opened(page=large_view)
    figures = {"start": 1000 * (time.perf_counter() - started)}
    until(tab, "document.querySelectorAll('section.turn').length > 0")
    assert tab.evaluate(LOADED) <= 4  # of hundreds
    assert tab.locator("#list .row").count() < 60
    figures["scroll"] = timed(
        tab,
        "document.getElementById('list').scrollTop = 300000",
        "Number(document.querySelector('#list .row').dataset.index) > 6000",
    )
    assert tab.locator("#list .row").count() < 60
    figures["filter"] = timed(
        tab,
        """const uid = document.getElementById('filter-uid'); uid.value = 'of 77';
           uid.dispatchEvent(new Event('input', { bubbles: true }))""",
        "document.getElementById('found').textContent === '20 of 10,000 trajectories'",
    )
    figures["open"] = timed(
        tab, "location.hash = '#/9876'", "document.querySelector('#group [data-index=\"9876\"]')"
    )
    assert tab.locator("#body .tok").count() > 200
    figures["colour"] = timed(
        tab,
        "document.querySelector('[data-mode=logprob]').click()",
        "document.querySelector('#body .odd1')",
    )
    for name, milliseconds in figures.items():
        record_property(name, round(milliseconds))
    assert {
        name: ms for name, ms in figures.items() if ms > QUICK_MS * (3 if name == "start" else 1)
    } == {}
    print(figures)

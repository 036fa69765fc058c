"""The viewer without a browser: the written files, what they load, the contrast of colours."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _stored import HOSTILE, LONG_LINE, LONG_MEMBERS, long_record, write_long_run, write_run

from skyrl_fast.cli import main
from skyrl_fast.viewer import build, details
from skyrl_fast.viewer.build import MARKER, PAGE, build_view
from skyrl_fast.viewer.columns import MagnitudeSample
from skyrl_fast.viewer.script import script

PAGES = Path(__file__).parents[2] / "skyrl_fast/viewer/page"
STYLE = (PAGES / "style.css").read_text()
TOKEN_LISTS = ("ids", "pieces", "mask", "engine", "trainer", "advantages", "versions")
LEAST_CONTRAST = 4.5  # WCAG 2.2, 1.4.3, for text of this size
LEAST_DIFFERENCE = 12.0  # CIE76 in Lab; 2.3 is a just noticeable difference

# Machado, Oliveira, Fernandes 2009, severity 1, on linear RGB.
PROTANOPIA = [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0519]]
DEUTERANOPIA = [[0.3673, 0.8608, -0.2281], [0.2801, 0.6727, 0.0472], [-0.0118, 0.0429, 0.9689]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


def received(path: Path) -> tuple[str, Any]:
    """Return name and value of a data file, parsed as a browser would."""
    content = path.read_bytes().decode("ascii")
    match = re.fullmatch(r'skyrlFastView\.receive\(("[^\n]*?"),("[^\n]*")\);\n', content)
    assert match and "<" not in content
    return json.loads(json.loads(match[1])), json.loads(json.loads(match[2]))


class Loaded:
    """The data of a page; each script is loaded once, when it is needed."""

    def __init__(self, view: Path) -> None:
        self.data = view / "data"
        self.scripts: dict[str, Any] = {}
        self.columns = self.load("summary")["columns"]

    def load(self, name: str) -> Any:
        if name not in self.scripts:
            received_name, self.scripts[name] = received(self.data / f"{name}.js")
            assert received_name == name
        return self.scripts[name]

    def head(self, index: int) -> dict[str, Any]:
        script, place = (self.columns[name][index] for name in ("script", "place"))
        head: dict[str, Any] = self.load(f"heads{script}")[place]
        return head

    def items(self, addresses: list[list[int]]) -> list[Any]:
        found = [self.load(f"items{script}")[place] for script, place, _ in addresses]
        lengths = [len(item if isinstance(item, str) else item["ids"]) for item in found]
        assert lengths == [count for *_, count in addresses]
        return found


# --- written files ------------------------------------------------------------------------------


def test_view_folder_contains_page_and_all_trajectories(run: Path, tmp_path: Path) -> None:
    view = build_view(run, tmp_path / "view")
    files = sorted(path.name for path in view.page.parent.iterdir() if path.is_file())
    assert files == sorted([*PAGE, MARKER])
    name, summary = received(tmp_path / "view/data/summary.js")
    assert name == "summary"
    columns = summary["columns"]
    assert view.trajectories == 6 * 12 + 2 == len(columns["reward"])
    page = Loaded(tmp_path / "view")
    heads = [page.head(index) for index in range(view.trajectories)]
    assert [len(head["turns"]) for head in heads] == columns["turns"]
    turn = heads[4]["turns"][1]
    (tokens,) = page.items(turn["tokens"])
    assert tokens["pieces"] == ["users", " ,", " <sql>", " "]
    assert tokens["mask"] == [1, 1, 1, 1] and tokens["engine"] == [-0.25, -0.5, -0.75, -1.0]
    assert turn["prompt_shared"] == 8 and turn["observation"] == []
    assert summary["scales"] == {"advantage": 1.0, "mismatch": pytest.approx(0.2, abs=0.01)}


@pytest.mark.spec("viewer.data-safety")
def test_hostile_text_is_unchanged_and_stays_inside_its_string(run: Path, tmp_path: Path) -> None:
    build_view(run, tmp_path / "view")
    _, summary = received(tmp_path / "view/data/summary.js")
    stored = HOSTILE.replace("\ud800", "\\ud800")
    assert summary["names"]["uid"][0] == stored
    assert summary["name"] == HOSTILE  # of config.json, where JSON keeps a lone surrogate
    page = Loaded(tmp_path / "view")
    head = page.head(0)
    assert "".join(page.items(head["turns"][0]["observation"])) == stored + LONG_LINE
    assert head["env_metrics"]["__proto__"] == stored
    _, metrics = received(tmp_path / "view/data/metrics.js")
    assert metrics["series"][HOSTILE] == [0.5] * 6


@pytest.mark.parametrize("value", ["</script>", "\u2028\u2029", "\ud800", "\\", '"', "\0\r\n<!--"])
def test_script_is_ascii_without_markup(value: str) -> None:
    line = script("f", value, {value: [value]})
    assert line.isascii() and "<" not in line and line.count("\n") == 1
    literals = json.loads("[" + line.removeprefix("f(").removesuffix(");\n") + "]")
    assert [json.loads(literal) for literal in literals] == [value, {value: [value]}]


@pytest.mark.spec("viewer.replace-page")
def test_earlier_page_is_replaced_and_other_folders_are_refused(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "view"
    build_view(run, out)
    mark = json.loads((out / MARKER).read_text())
    mark["files"].append("data/items99.js")
    (out / MARKER).write_text(json.dumps(mark))
    (out / "data/items99.js").write_text("of an earlier page with more items")
    build_view(run, out)
    assert not (out / "data/items99.js").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["view"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="not empty, and not written by this command"):
        build_view(run, other)
    assert (other / "thesis.tex").read_text() == "mine"


def files_below(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize(
    "other", ["note.txt", "data/items99.js", "folder/note.txt", "empty/", "data/empty/"]
)
@pytest.mark.spec("viewer.own-files")
def test_page_with_files_of_others_is_refused_by_name(
    run: Path, tmp_path: Path, other: str
) -> None:
    out = tmp_path / "view"
    build_view(run, out)
    path = out / other
    if other.endswith("/"):
        path.mkdir()
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    before = files_below(tmp_path)
    with pytest.raises(ValueError, match=rf"holds '{other.rstrip('/')}', which this command"):
        build_view(run, out)
    assert files_below(tmp_path) == before


@pytest.mark.spec("viewer.own-files")
def test_link_inside_a_page_is_not_followed(run: Path, tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "view", tmp_path / "elsewhere"
    build_view(run, out)
    (out / "data").rename(elsewhere)
    (out / "data").symlink_to(elsewhere)
    before = files_below(tmp_path)
    with pytest.raises(ValueError, match="holds 'data', which"):
        build_view(run, out)
    assert files_below(tmp_path) == before


@pytest.mark.parametrize(
    "mark", ["", "[]", '{"trajectories": 3}', '{"files": 3}', "\xff", "[" * 100_000]
)
def test_page_with_a_damaged_mark_file_is_refused(run: Path, tmp_path: Path, mark: str) -> None:
    out = tmp_path / "view"
    build_view(run, out)
    (out / MARKER).write_text(mark, encoding="latin-1")
    before = files_below(out)
    with pytest.raises(ValueError, match="which this command did not write"):
        build_view(run, out)
    assert files_below(out) == before


def test_page_never_replaces_the_run(run: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    build_view(run, site)
    copied = site / "b"
    shutil.copytree(run, copied)
    before = files_below(tmp_path)
    for out in (site, copied):
        with pytest.raises(ValueError, match=r"contains the run .* choose another --out"):
            build_view(copied, out)
    assert files_below(tmp_path) == before


def test_hidden_folders_next_to_the_page_stay(run: Path, tmp_path: Path) -> None:
    (tmp_path / ".view.partial").mkdir()
    (tmp_path / ".view.partial/note").write_text("mine")
    build_view(run, tmp_path / "view")
    assert (tmp_path / ".view.partial/note").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".view.partial", "view"]


def test_file_that_appears_while_the_page_is_written_stays(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "view"
    build_view(run, out)

    def write(*arguments: Any) -> Any:
        (out / "note").write_text("mine")
        return written(*arguments)

    written = build._write
    monkeypatch.setattr(build, "_write", write)
    with pytest.raises(ValueError, match="holds 'note', which"):
        build_view(run, out)
    assert (out / "note").read_text() == "mine" and (out / "index.html").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["view"]


@pytest.mark.spec("viewer.replace-page")
def test_link_is_kept_and_current_folder_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("real", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for _ in range(2):
        assert build_view(run, tmp_path / "link").page == tmp_path / "real/index.html"
    assert (tmp_path / "link").is_symlink() and (tmp_path / "link/index.html").is_file()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ValueError, match="the current folder or one above it cannot be replaced"):
        build_view(run, Path("."))
    monkeypatch.chdir(tmp_path / "real/data")
    with pytest.raises(ValueError, match="the current folder or one above it cannot be replaced"):
        build_view(run, tmp_path / "link")


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({"turns": None}, "TypeError"),
        ({"tokens": []}, "ValueError"),
        ({"tokens": [{}, {}]}, "KeyError: 'prompt_shared'"),
    ],
)
def test_invalid_line_is_reported_with_its_position(
    changed: dict[str, Any], wanted: str, run: Path, tmp_path: Path
) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    part = copied / "trajectories/step_000006.jsonl"
    first, second, *_ = part.read_text().splitlines(keepends=True)
    part.write_text(first + json.dumps({**json.loads(second), **changed}) + "\n")
    where = (
        f"step_000006.jsonl: the line at byte {len(first.encode())} is not a trajectory: {wanted}"
    )
    with pytest.raises(ValueError, match=re.escape(where)):
        build_view(copied)


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", '{"trainer": []}', "\xff"])
def test_name_of_a_damaged_config_is_that_of_the_folder(
    content: str, run: Path, tmp_path: Path
) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(run / "trajectories", copied / "trajectories")
    (copied / "config.json").write_text(content, encoding="latin-1")
    build_view(copied)
    _, summary = received(copied / "view/data/summary.js")
    assert summary["name"] == "copied"


def test_failed_build_keeps_the_earlier_page(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run / "trajectories", copied / "trajectories")
    view = build_view(copied)
    before = view.page.read_bytes()
    (copied / "trajectories/step_000009.jsonl").write_text('{"format": 2}\n')
    with pytest.raises(ValueError, match="expected trajectories of format 1, got 2"):
        build_view(copied)
    assert view.page.read_bytes() == before
    assert {path.name for path in copied.iterdir()} == {"trajectories", "view"}


@pytest.mark.spec("viewer.running-run")
def test_killed_run_is_shown_up_to_its_last_complete_line(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    part = copied / "trajectories/step_000006.jsonl"
    part.write_bytes(part.read_bytes()[:-9])
    metrics = copied / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-9])
    view = build_view(copied)
    assert view.trajectories == 6 * 12 + 2 - 1
    assert received(view.page.parent / "data/metrics.js")[1]["steps"] == [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_long_run(tmp_path_factory.mktemp("long"))


@pytest.mark.spec("viewer.bounded-files")
def test_data_files_are_bounded_however_long_a_group_is(long_run: Path, tmp_path: Path) -> None:
    build_view(long_run, tmp_path / "view")
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "view/data").iterdir()}
    assert sum(sizes.values()) > LONG_MEMBERS * 2 * build.SCRIPT_BYTES
    assert max(sizes.values()) <= build.SCRIPT_BYTES + 100  # the call around the items


def test_every_token_and_character_of_long_trajectories_is_in_the_data(
    long_run: Path, tmp_path: Path
) -> None:
    build_view(long_run, tmp_path / "view")
    page = Loaded(tmp_path / "view")
    for repetition in range(LONG_MEMBERS):
        record = long_record(repetition)
        head = page.head(repetition)
        for turn, written, tokens in zip(
            head["turns"], record["turns"], record["tokens"], strict=True
        ):
            assert "".join(page.items(turn["context"])) == written["context"]
            assert "".join(page.items(turn["observation"])) == written["observation"]
            items = page.items(turn["tokens"])
            joined = {name: [x for item in items for x in item[name]] for name in TOKEN_LISTS}
            assert "".join(joined["pieces"]) == written["response"]
            assert len(joined["pieces"]) == len(joined["ids"])
            assert joined["ids"] == tokens["response_ids"]
            assert joined["mask"] == tokens["loss_mask"]
            assert joined["versions"] == tokens["policy_versions"]
            expected = [float(f"{value:.4g}") for value in tokens["rollout_logprobs"]]
            assert joined["engine"] == pytest.approx(expected, rel=1e-3)
            assert joined["trainer"] == joined["advantages"] == []
            for item in items:
                assert all(len(item[name]) in (0, len(item["ids"])) for name in TOKEN_LISTS)
                assert len(item["ids"]) <= 3000 and sum(map(len, item["pieces"])) <= 30_000
        assert len(head["env_metrics"]) == 40
        assert {len(value) for value in head["env_metrics"].values()} == {401}
    previews = page.load("previews0")
    assert [text[:5] for text in previews] == [f'"日 {i}<' for i in range(LONG_MEMBERS)]
    assert {len(text) for text in previews} == {161}


@pytest.mark.spec("viewer.bounded-files")
def test_opening_a_long_trajectory_loads_two_data_files(long_run: Path, tmp_path: Path) -> None:
    build_view(long_run, tmp_path / "view")
    page = Loaded(tmp_path / "view")
    first = page.head(5)["turns"][0]
    page.items(first["context"][:1] + first["tokens"][:1] + first["observation"][:1])
    assert len(page.scripts) <= 3 + 1  # the summary, the head, and at most two files of items


def test_short_trajectories_are_in_one_file_of_items(run: Path, tmp_path: Path) -> None:
    view = build_view(run, tmp_path / "view")
    page = Loaded(tmp_path / "view")
    for index in range(view.trajectories):
        turns = page.head(index)["turns"]
        names = ("context", "tokens", "observation")
        scripts = {address[0] for turn in turns for name in names for address in turn[name]}
        assert len(scripts) <= 1


def test_rounding_has_four_significant_digits() -> None:
    values = np.array([0, -0.123456, 1234567.0, 9.99996e-7, np.nan, -7.0, 123.45], np.float32)
    found = details.round_list(values)
    assert found == [0.0, -0.1235, 1235000.0, 1e-6, None, -7.0, 123.4]
    assert details.round_list(np.full(3, np.nan, np.float32)) == []


@pytest.mark.spec("viewer.static-page")
def test_view_command_output_and_exit_codes(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", str(run), "--out", str(tmp_path / "view")]) == 0
    output = capsys.readouterr().out
    assert "74 trajectories" in output
    assert f"open file://{tmp_path}/view/index.html" in output
    assert main(["view", str(tmp_path / "nothing")]) == 2
    assert "no such folder" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["view", str(tmp_path / "empty")]) == 2
    assert "trainer.dump_trajectories=false" in capsys.readouterr().err


def test_percentile_comes_from_an_even_sample() -> None:
    sample = MagnitudeSample(max_size=100)
    for start in range(0, 10_000, 50):
        sample.add(np.arange(start, start + 50, dtype=np.float32) - 5000)
    middle = sample.percentile(50)
    assert middle is not None and abs(middle - 2500) < 100
    assert MagnitudeSample().percentile(50) is None


# --- page permissions ---------------------------------------------------------------------------


@pytest.mark.spec("viewer.text-safety")
def test_page_creates_no_markup_from_text_and_uses_no_network() -> None:
    for path in PAGES.iterdir():
        content = path.read_text()
        for word in (
            *("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser"),
            *("eval(", "Function(", "setTimeout('", "fetch(", "XMLHttpRequest", "WebSocket"),
            *("import(", "sendBeacon", "createContextualFragment", "srcdoc"),
        ):
            assert word not in content, f"{path.name}: {word}"
        addresses = set(re.findall(r"\b(?:https?:)?//[\w.]+[^\s\"')]*", content))
        assert addresses <= {"http://www.w3.org/2000/svg"}, (
            path.name
        )  # an XML namespace, never loaded


def test_content_policy_allows_only_local_files() -> None:
    page = (PAGES / "index.html").read_text()
    policy = re.search(r'Content-Security-Policy"\s+content="([^"]*)"', page)
    assert policy and policy[1].split("; ")[0] == "default-src 'none'"
    assert "unsafe" not in policy[1] and "http" not in policy[1]
    loaded = set(re.findall(r'(?:src|href)="([^"#]+)"', page))
    assert loaded == set(PAGE) - {"index.html"}
    assert " on" not in re.sub(r"<[^>]*>", lambda tag: tag[0].lower(), page).replace(" one ", "")


# Opens every trajectory of a page: `absorber` stands for the document and whatever it returns.
OPEN_ALL = """
const { readFileSync } = require("fs");
const vm = require("vm");
const folder = process.argv[1];
const absorber = new Proxy(function () {}, {
  get: (_, name) =>
    name === Symbol.toPrimitive ? () => 0
    : name === Symbol.iterator ? [][Symbol.iterator].bind([])
    : name === "then" ? undefined : absorber,
  apply: () => absorber, construct: () => absorber, set: () => true,
});
const page = vm.createContext({ document: absorber, IntersectionObserver: absorber,
  requestAnimationFrame: (call) => call(), window: {}, console });
const run = (name) => vm.runInContext(readFileSync(`${folder}/${name}`, "utf8"), page);
const names = ["text", "data", "list", "tokens", "forest", "trajectory", "chart", "charts"];
names.forEach((name) => run(`${name}.js`));
const SF = page.skyrlFastView;
SF.showProblem = (error) => { throw error; };
SF.loadData = async (name) => {
  let found;
  page.skyrlFastView = { receive: (_, text) => (found = JSON.parse(text)) };
  run(`data/${name}.js`);
  return found;
};
process.on("unhandledRejection", (error) => { console.error(error); process.exit(1); });
(async () => {
  SF.setSummary(await SF.loadData("summary"));
  for (let index = 0; index < SF.total; index++) {
    const details = await SF.loadTrajectory(index);
    SF.showTrajectory(absorber, index, details, "advantage", () => {}).paint("mismatch");
    SF.showForest(absorber, details, () => {})(0);
    SF.showGroup(absorber, index, () => {});
    SF.listRow(index, { position: 1, of: 1, chosen: false });
  }
  SF.showCharts(absorber, await SF.loadData("metrics"), () => {});
  console.log(SF.total);
})();
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.spec("viewer.turns")
def test_scripts_open_every_trajectory_without_an_error(run: Path, tmp_path: Path) -> None:
    build_view(run, tmp_path / "view")
    node = ["node", "-e", OPEN_ALL, str(tmp_path / "view")]
    done = subprocess.run(node, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["74"]


# --- colours ------------------------------------------------------------------------------------


def palette(selector: str) -> dict[str, str]:
    start = STYLE.index(selector + " {")
    block = STYLE[start : STYLE.index("}", start)]
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))


LIGHT = palette(":root")
DARK = palette(':root[data-theme="dark"]')


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(one: str, two: str) -> float:
    lightness = [float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (one, two)]
    return (max(lightness) + 0.05) / (min(lightness) + 0.05)


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    x, y, z = (to_xyz @ rgb.clip(0, 1)) / [0.9505, 1.0, 1.089]
    f = [t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z)]
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.spec("viewer.dark-mode")
def test_text_contrast_on_every_colour(colours: dict[str, str]) -> None:
    shades = [f"{kind}{level}" for kind in ("pos", "neg", "odd") for level in range(1, 6)]
    pairs = [("text", name) for name in (*shades, "page", "sheet", "raised")]
    pairs += [("quiet", name) for name in ("page", "sheet", "raised", "pos1")]
    pairs += [(name, "sheet") for name in ("good", "bad", "link", "agent", "env", "flag")]
    pairs += [("good", "pos1"), ("bad", "pos1"), ("flag", "flag-sheet"), ("sheet", "link")]
    low = {pair: contrast(colours[pair[0]], colours[pair[1]]) for pair in pairs}
    assert {pair: value for pair, value in low.items() if value < LEAST_CONTRAST} == {}


@pytest.mark.parametrize("vision", [PROTANOPIA, DEUTERANOPIA, np.eye(3)])
@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.spec("viewer.token-colors")
def test_signs_differ_with_colour_blindness(colours: dict[str, str], vision: Any) -> None:
    for level in range(2, 6):
        one, two = (lab(np.array(vision) @ linear(colours[f"{k}{level}"])) for k in ("pos", "neg"))
        assert float(np.linalg.norm(one - two)) > LEAST_DIFFERENCE, level


def test_dark_colours_are_the_same_by_system_setting_and_by_choice() -> None:
    start = STYLE.index(':root:not([data-theme="light"])')
    block = STYLE[start : STYLE.index("}", start)]
    assert dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)) == DARK
    assert LIGHT.keys() == DARK.keys()


# --- the documentation --------------------------------------------------------------------------

GUIDE = (PAGES.parents[2] / "docs/guide/viewer.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", GUIDE, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
@pytest.mark.spec("store.reading")
def test_python_examples_of_the_guide_run(number: int, tmp_path: Path, monkeypatch: Any) -> None:
    module = re.search(r"import (pandas|datasets)", BLOCKS[number])
    if module:
        pytest.importorskip(module[1])
    write_run(tmp_path / "quickstart/run", steps=2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    names: dict[str, Any] = {}
    exec(BLOCKS[number], names)
    if "index" in names:
        assert len(names["index"]) == 26 and len(names["turns"]) == 12
    elif "rows" in names:
        assert len(names["rows"]) == 24
    else:
        assert names["trajectory"].entry.step == 2 and len(names["gap"]) > 0

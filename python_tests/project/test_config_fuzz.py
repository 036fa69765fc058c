"""Damaged settings files: a checked configuration or an error of one line, never a traceback."""

import json
import random
import time
from pathlib import Path

import pytest

from skyrl_fast.config import Config, ConfigError, load_config, to_dict

pytestmark = pytest.mark.spec("settings.one-line-errors")

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").rglob("*.yaml"))
VALUES = [
    *("null", "~", "", "true", "no", "0", "-1", "1e400", ".inf", "-.inf", ".nan", "0x1F", "1_0"),
    *("9" * 5_000, "-" + "9" * 400, "1e-400", "0.1.2", "1:30", "2026-01-01", "2026-13-45", "0o9"),
    *("'a'", '"\\ud800"', '"\\x00"', "'\x1b[2J'", "!!binary aGk=", "!!set {a, b}", "!!str 3"),
    *("!!python/object:os.system x", "!!omap [a: 1]", "!unknown x", "!!int x", "!!float y"),
    *("[]", "{}", "[1, [2, [3]]]", "{a: {b: c}}", "{1: 2}", "{null: 3}", "{[1]: 2}", "[,]", "{"),
    *("${trainer}", "${trainer.seed}", "${no.such}", "${", "${oc.env:HOME}", "${oc.env:NO_SUCH}"),
    *("${oc.decode:'[1'}", "${oc.create:{a: 1}}", "${oc.select:x}", "${${a}}", "a${.b}c", "???"),
    *(
        "${oc.dict.keys:trainer}",
        "${oc.env:}",
        "${no_resolver:1}",
        "${oc.deprecated:a}",
        "*nothing",
    ),
    *("&a [*a]", "&b {<<: *b}", "|\n  text", ">-\n  text", "@", "`", "%", "? x", "a: b: c", "- -"),
    *("[" * 200, "{a: " * 200, "[" * 3_000, "a" * 100_000, "\t", "é\u2028\ufeff", "${a" * 500),
    *("module:name", "no_such_module:x", "/nowhere.py:x", "json:loads", "os:environ", ":", "x:"),
]


def damaged(source: random.Random) -> bytes:
    """Return a settings file of the examples, changed in a few places."""
    text = source.choice(EXAMPLES).read_text()
    for _ in range(source.randrange(1, 3)):
        text = changed(source, text)
    data = bytearray(text.encode(errors="surrogatepass"))
    if data and source.random() < 0.1:
        data[source.randrange(len(data))] ^= 1 << source.randrange(8)
    return bytes(data)


def changed(source: random.Random, text: str) -> str:
    lines = text.splitlines() or [""]
    place = source.randrange(len(lines))
    kind = source.randrange(9)
    if kind < 4 and ":" in lines[place]:  # another value
        lines[place] = lines[place].partition(":")[0] + ": " + source.choice(VALUES)
    elif kind == 4:  # another key
        indent = len(lines[place]) - len(lines[place].lstrip())
        lines[place] = " " * indent + source.choice([*VALUES, "trainer.seed"]) + ": 1"
    elif kind == 5:
        del lines[place]
    elif kind == 6:  # twice, or elsewhere
        lines.insert(source.randrange(len(lines)), lines[place])
    elif kind == 7:
        lines[place] = " " * source.randrange(7) + lines[place].lstrip()
    else:
        start = source.randrange(len(text) + 1)
        return text[:start] + source.choice(VALUES) + text[start + source.randrange(20) :]
    return "\n".join(lines)


def override(source: random.Random) -> str:
    names = [
        "trainer.seed",
        "generator",
        "a.b",
        "",
        "environment.register",
        "trainer..x",
        "data[0]",
    ]
    return f"{source.choice(names)}={source.choice(VALUES)}"


def fuzz(folder: Path, seeds: range) -> int:
    """Load one file for each seed; return how many were accepted."""
    accepted = 0
    path = folder / "config.yaml"
    for seed in seeds:
        source = random.Random(seed)
        path.write_bytes(damaged(source))
        overrides = [override(source) for _ in range(source.choice([0, 0, 1, 2]))]
        started = time.monotonic()
        try:
            config = load_config(path, overrides)
        except ConfigError as error:
            assert len(str(error).splitlines()) == 1, (seed, str(error)[:500])
            assert len(str(error)) < 1_000, (seed, len(str(error)))
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}") from error
        else:
            assert isinstance(config, Config)
            json.dumps(to_dict(config), default=str)
            accepted += 1
        assert time.monotonic() - started < 30, seed
    return accepted


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_damaged_settings_files(tmp_path: Path) -> None:
    assert len(EXAMPLES) > 5
    assert 0 < fuzz(tmp_path, range(150)) < 150


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.timeout(1_800)
def test_ten_thousand_damaged_settings_files(tmp_path: Path) -> None:
    assert fuzz(tmp_path, range(10_000)) > 200

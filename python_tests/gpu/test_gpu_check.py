"""The GPU check and benchmark in parts: what runs, what is left for the next call, what fails."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from scripts import gpu_bench, gpu_check, parts
from scripts.op_tests import EMULATED_TESTS
from scripts.parts import Part, run_parts

SLEEPS = "import time; time.sleep(600)"


def python(name: str, program: str, limit: float = 60, **options: str) -> Part:
    return Part(name, (sys.executable, "-c", program), limit, **options)


def run(folder: Path, made: Sequence[Part], *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    parts.add_options(parser)
    return run_parts("check", made, folder, parser.parse_args(arguments))


@pytest.fixture(autouse=True)
def fixed_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "commit", lambda: "v1")


def test_every_part_runs_and_failures_set_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [
        python("bad", "print('a line'); raise SystemExit(3)"),
        python("good", "print('42 passed')"),
        Part("absent", ("no-such-program", "x"), 60),
    ]
    assert run(tmp_path, made) == 1
    said = capsys.readouterr().out
    assert "  bad: failed with status 3 in 0 s; a line\n" in said
    assert "  good: passed in 0 s; 42 passed\n" in said
    assert "  absent: failed: no-such-program is not on PATH" in said
    assert (tmp_path / "bad.log").read_text() == "a line\n"
    assert run(tmp_path, made, "--parts", "good") == 0


def test_parts_that_passed_are_not_run_again_at_the_same_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = tmp_path / "counts"
    program = f"open({str(counts)!r}, 'a').write(NAME); raise SystemExit(NAME == 'b')"
    made = [python(name, program.replace("NAME", repr(name))) for name in ("a", "b")]
    folder = tmp_path / "build"
    assert [run(folder, made), run(folder, made)] == [1, 1]
    assert counts.read_text() == "abb"
    run(folder, made, "--again", "--parts", "a")
    assert counts.read_text() == "abba"
    monkeypatch.setattr(parts, "commit", lambda: "v2")
    run(folder, made)
    assert counts.read_text() == "abbaab"


@pytest.mark.slow
def test_a_part_is_stopped_with_its_children_at_its_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child = tmp_path / "child"
    program = (
        "import subprocess, sys; "
        f"p = subprocess.Popen([sys.executable, '-c', {SLEEPS!r}]); "
        f"open({str(child)!r}, 'w').write(str(p.pid)); p.wait()"
    )
    assert run(tmp_path, [python("slow", program, limit=3), python("next", "")]) == 1
    said = capsys.readouterr().out
    assert "  slow: stopped after 3 s in" in said and "  next: passed" in said
    deadline = time.monotonic() + 60
    while Path(f"/proc/{child.read_text()}").exists():  # until it is reaped
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_does_not_fit_into_the_seconds_is_left_for_the_next_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 0.0, 90.0, 90.0])  # start; before each part: 100 s are given
    made = [python("first", ""), python("second", ""), python("third", "", limit=4)]
    parser = argparse.ArgumentParser()
    parts.add_options(parser)
    options = parser.parse_args(["--seconds", "100"])
    assert run_parts("check", made, tmp_path, options, clock=lambda: next(clock)) == 1
    said = capsys.readouterr().out
    assert "  second: not run yet\n" in said and "  third: passed" in said
    assert "check: 1 of 3 parts are left; the same command runs them" in said
    assert run(tmp_path, made) == 0
    stored = json.loads((tmp_path / "parts.json").read_text())
    assert {name: part["result"] for name, part in stored["parts"].items()} == {
        "first": "passed",
        "second": "passed",
        "third": "passed",
    }


def test_parts_of_a_group_run_at_the_same_time(tmp_path: Path) -> None:
    """Each waits for the other's file."""
    program = (
        "import pathlib, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "(folder / MINE).touch()\n"
        "while not (folder / OTHER).exists(): time.sleep(0.02)"
    )
    made = [
        python(mine, program.replace("MINE", repr(mine)).replace("OTHER", repr(other)), group="g")
        for mine, other in (("a.x", "b.x"), ("b.x", "a.x"))
    ]
    assert run(tmp_path / "build", made) == 0


def test_wheels_are_installed_where_the_parts_find_them(tmp_path: Path) -> None:
    import zipfile

    wheels = tmp_path / "wheels"
    wheels.mkdir()
    info = "carried-1.0.dist-info"
    with zipfile.ZipFile(wheels / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "ANSWER = 42\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    made = [python("uses", "import carried; print(carried.ANSWER)")]
    assert run(tmp_path / "build", made, "--wheels", str(wheels)) == 0
    assert (tmp_path / "build" / "uses.log").read_text() == "42\n"


def test_the_check_runs_all_tests_and_every_sanitizer() -> None:
    made = {part.name: part for part in gpu_check.check_parts("advantage", dry=False)}
    selected = [made[name].command for name in ("tests-kernels", "tests-triton", "tests-others")]
    assert all("-m gpu" in " ".join(command) for command in selected)
    assert set(EMULATED_TESTS) <= set(selected[0])
    ignored = {word.removeprefix("--ignore=") for word in selected[2] if "--ignore" in word}
    assert ignored == {*EMULATED_TESTS, gpu_check.TRITON_TESTS}
    for tool in ("memcheck", "racecheck", "initcheck", "synccheck"):
        text = " ".join(made[tool].command)
        assert f"--tool {tool} --error-exitcode 9" in text and "(advantage) and not graph" in text
        assert "python_tests/gpu/test_logprob_cuda.py" in text
        assert made[tool].environment == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def test_every_benchmark_group_belongs_to_a_part() -> None:
    from bench.gpu import cases

    size = cases.FULL
    groups = [f"logprob forward 8192 x {vocab}" for vocab in size.vocabs]
    groups += ["over tokens: x", "linear_logprob forward", "pack 17006 x (3500 + 500)"]
    groups += [f"prefix tree: agents {shape}" for shape in ("search", "agentic", "sql")]
    groups += ["optimizer step: x"]
    assert len(cases.BATCH_WORKS) == 4 and size.batch[0] == 17_006
    chosen = [full for full, _, _ in gpu_bench.GROUPS.values()]
    assert {group: sum(only in group for only in chosen) for group in groups} == dict.fromkeys(
        groups, 1
    )


@pytest.mark.parametrize("script", [gpu_check, gpu_bench])
def test_without_a_gpu_nothing_is_claimed(script: object, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr("sys.argv", ["script"])
    with pytest.raises(SystemExit, match="there is no GPU here; nothing was"):
        script.main()  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("script", [gpu_check, gpu_bench])
def test_dry_run(
    script: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(script, "BUILD", tmp_path)
    monkeypatch.setattr("sys.argv", ["script", "--dry"])
    with pytest.raises(SystemExit) as stop:
        script.main()  # type: ignore[attr-defined]
    assert stop.value.code == 0, capsys.readouterr().out

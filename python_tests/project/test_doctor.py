"""skyrl-fast doctor, and the error of an installation without the extension."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_fast import _C, cli
from skyrl_fast.commands import doctor
from skyrl_fast.commands.command import UsageError, needs_extra
from skyrl_fast.rollout.engine import vllm_start


def test_report_lists_every_check() -> None:
    report = json.loads(doctor.report(doctor.findings(), as_json=True))
    found = {f["name"]: f for f in report["findings"]}
    assert report["ok"] is True
    assert found["SIMD level"]["found"] == _C.simd_level()
    assert _C.compiler in found["extension"]["found"]
    assert {"torch", "vllm", "triton", "CUDA kernels", "machine"} <= set(found)


def test_missing_parts_come_with_advice() -> None:
    found = doctor.findings(lambda package: None)
    findings = {f.name: f for f in found}
    assert findings["vllm"].found == "not installed"
    assert "pip install" in findings["vllm"].advice
    assert findings["vllm"].advice in doctor.report(found, as_json=False)
    assert "vllm's patches" not in findings


@pytest.mark.parametrize(("is_tree", "package"), [(True, "."), (False, "skyrl-fast")])
def test_advice_names_the_package_outside_a_source_tree(
    is_tree: bool, package: str, tmp_path: Path
) -> None:
    if is_tree:
        (tmp_path / "pyproject.toml").touch()
    assert doctor.install_command("train", tmp_path) == f"pip install '{package}[train]'"
    missing = doctor.package_finding("nothing", ("no-such-package",), "the advice")
    assert missing.advice == "the advice"
    advice = {f.name: f.advice for f in doctor.findings()}
    assert advice["transformers"] == ""


def test_cuda_builds_beside_a_cpu_torch_are_to_be_uninstalled() -> None:
    versions = {"torch": "2.13.0+cpu", "torchvision": "0.28.0", "torchaudio": "2.11.0+cpu"}
    findings = {f.name: f for f in doctor.findings(versions.get)}
    assert findings["CUDA builds"].advice.endswith("pip uninstall -y torchvision")
    said = r"^torchvision cannot .* pip uninstall -y torchvision$"
    with pytest.raises(UsageError, match=said), needs_extra("train", versions.get):
        raise ImportError("Could not import module 'PreTrainedModel'")
    versions["torch"] = "2.13.0"
    assert "CUDA builds" not in {f.name for f in doctor.findings(versions.get)}
    said = r"missing: x; pip install 'skyrl-fast\[train\]'$"
    with pytest.raises(UsageError, match=said), needs_extra("train", versions.get):
        raise ImportError("x")


def test_library_that_the_cpu_build_of_vllm_lacks_is_named() -> None:
    absent = "libnuma.so.404"
    missing = vllm_start.missing_library(absent, is_cpu_build=True)
    assert missing.startswith(f"vLLM's CPU build needs a library: {absent}: ")
    assert missing.endswith("; apt-get install libnuma1")
    assert vllm_start.missing_library(absent, is_cpu_build=False) == ""


def test_missing_extension_error_says_how_to_fix_it() -> None:
    code = "import sys; sys.modules['skyrl_fast._C'] = None; import skyrl_fast"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1
    assert "pip install ." in run.stderr


def test_json_and_the_table_are_two_outputs() -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--json", "--gpu"])
    assert ended.value.code == 2

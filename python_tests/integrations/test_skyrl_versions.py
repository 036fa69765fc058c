"""Which functions are replaced in each SkyRL version, and what a changed source does."""

import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import skyrl_versions
from scripts.skyrl_versions import PAGE, page, source_tree, state
from skyrl_fast.integrations.skyrl.names import BY_NAME, TARGETS, VERSIONS


def trees() -> dict[str, Path]:
    try:
        return {version: source_tree(version) for version in VERSIONS}
    except OSError as error:
        pytest.skip(str(error))


@pytest.mark.peers
@pytest.mark.spec("dropin.known-source")
def test_versions_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(trees())


@pytest.mark.peers
def test_every_function_of_the_installed_skyrl_is_known() -> None:
    skyrl = pytest.importorskip("skyrl", reason="SkyRL is not installed")
    tree = Path(skyrl.__file__).parent.parent
    assert [target.name for target in TARGETS if state(tree, target) == "kept"] == []


@pytest.mark.spec("dropin.fresh")
def test_newer_release_is_reported() -> None:
    known = skyrl_versions.known_releases()
    assert known["skyrl"] == VERSIONS[-1]
    assert skyrl_versions.newer_releases(known) == []
    newer = skyrl_versions.newer_releases({**known, "skyrl": "0.10.0", "trl": "0.1"})
    assert newer == [f"skyrl 0.10.0 is newer than {VERSIONS[-1]}, the last one that was tested"]


CHECK = "    _verify_inputs(prompts, responses, rewards, loss_masks)\n"
HARMLESS = (CHECK, f"    # rows\n{CHECK.replace('(', '( ')}")
HARMFUL = (
    '        raise RuntimeError("No outputs generated")\n',
    '        raise ValueError("No outputs generated")\n',
)
CONVERT, VALIDATE = "convert_prompts_responses_to_batch_tensors", "validate_generator_output"


@pytest.fixture
def newer_skyrl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A SkyRL with a comment in one function, and another error in a second; on the path."""
    skyrl = pytest.importorskip("skyrl", reason="SkyRL is not installed")
    shutil.copytree(Path(skyrl.__file__).parent, tmp_path / "skyrl")
    for name, (old, new) in {CONVERT: HARMLESS, VALIDATE: HARMFUL}.items():
        path = tmp_path / f"{BY_NAME[name].module.replace('.', '/')}.py"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
    original = {name: m for name, m in sys.modules.items() if name.partition(".")[0] == "skyrl"}
    for name in original:
        del sys.modules[name]
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "skyrl"]:
        del sys.modules[name]
    sys.modules.update(original)


@pytest.mark.peers
@pytest.mark.spec("dropin.calls-known")
def test_changed_function_and_its_callers_are_kept_and_named(newer_skyrl: Path) -> None:
    import skyrl_fast.integrations.skyrl as ours

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            report = ours.install(ray_workers=False)
        module = sys.modules[BY_NAME[VALIDATE].module]
        assert Path(module.__file__).is_relative_to(newer_skyrl)
        assert report.row(CONVERT).state == "replaced"
        callers = ["concatenate_generator_outputs", "merge_stepwise_output"]
        assert [row.name for row in report.rows if row.state == "kept"] == [
            VALIDATE, *callers, "reduce_loss",
        ]  # fmt: skip
        (warning,) = [w for w in caught if w.category is ours.SkyRLFastWarning]
        assert all(name in str(warning.message) for name in (VALIDATE, *callers))
        with pytest.raises(ValueError, match="No outputs generated"):
            module.validate_generator_output(0, {"response_ids": []})
        with pytest.raises(ValueError, match="No outputs generated"):
            ours.validate_generator_output(0, {"response_ids": []})
    finally:
        ours.uninstall()


@pytest.mark.peers
def test_report_of_a_newer_version_names_what_changed(newer_skyrl: Path) -> None:
    found = (Path(place) for place in sys.path if Path(place) != newer_skyrl)
    known = next(place for place in found if (place / "skyrl").is_dir())
    lines = list(skyrl_versions.report(newer_skyrl, known))
    (unknown,) = [line for line in lines if line.startswith("unknown source")]
    assert VALIDATE in unknown and CONVERT not in unknown
    assert f"+{HARMFUL[1].rstrip()}" in lines and f"-{HARMFUL[0].rstrip()}" in lines
    assert not any("# rows" in line for line in lines)
    tests = [line for line in lines if line.startswith("tests that decide: ")]
    assert any("test_skyrl_fuzz.py::test_validate" in line for line in tests)

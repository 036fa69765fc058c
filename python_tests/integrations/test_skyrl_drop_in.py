"""Installation in SkyRL, tested on a small fake package of its name: SkyRL is not needed."""

import functools
import importlib
import os
import platform
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from skyrl_fast.integrations import skyrl
from skyrl_fast.integrations.calls import Row
from skyrl_fast.integrations.skyrl import ray_workers, replacement, switch
from skyrl_fast.integrations.skyrl.names import KEPT, PPO, TARGETS, Target
from skyrl_fast.integrations.source import UNKNOWN_SOURCE, fingerprint_with_calls, normalize_source

PREPROCESS = '''
from skyrl.train.checks import check_uids


def compute_prompt_boundaries(uids):
    """Original."""
    check_uids(uids)
    return "original"


def make_router_padding_mask(attention_mask, captured_route_lengths):
    return "another source"
'''
CHECKS = """
from skyrl.train import kinds


def check_uids(uids):
    if not kinds.is_list(uids):  # odd input
        raise KeyError("original")
"""
KINDS = """
def is_list(uids):
    return isinstance(uids, list)


def is_tuple(uids):
    return isinstance(uids, tuple)
"""
TRAINER = """
from skyrl.train.dataset.preprocess import compute_prompt_boundaries, make_router_padding_mask


def boundaries(uids):
    return compute_prompt_boundaries(uids)
"""


@pytest.fixture
def fake_skyrl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package `skyrl` with two functions, the first with a known source, and a trainer."""
    for name, text in {
        "skyrl/__init__.py": '__version__ = "9.9"',
        "skyrl/train/__init__.py": "",
        "skyrl/train/checks.py": CHECKS,
        "skyrl/train/kinds.py": KINDS,
        "skyrl/train/dataset/__init__.py": "",
        "skyrl/train/dataset/preprocess.py": PREPROCESS,
        "skyrl/train/trainer.py": TRAINER,
        "skyrl/train/generators/__init__.py": "",
        "skyrl/train/generators/skyrl_gym_generator.py": "",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    original = {name: m for name, m in sys.modules.items() if name.partition(".")[0] == "skyrl"}
    for name in original:
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("skyrl.train.dataset.preprocess")
    known = fingerprint_with_calls([module.compute_prompt_boundaries], "skyrl")
    place = "skyrl.train.dataset.preprocess"
    targets = tuple(
        Target(t.name, place, {known: "9.9"}, t.home) if "boundaries" in t.name else t
        for t in TARGETS
        if t.short_name in ("compute_prompt_boundaries", "make_router_padding_mask")
    )
    monkeypatch.setattr(switch, "TARGETS", targets)
    for name in [n for n in sys.modules if n.partition(".")[0] == "skyrl"]:
        del sys.modules[name]
    yield tmp_path
    skyrl.uninstall()
    for name in [n for n in sys.modules if n.partition(".")[0] == "skyrl"]:
        del sys.modules[name]
    sys.modules.update(original)


def test_known_source_is_replaced_everywhere_and_restored(fake_skyrl: Path) -> None:
    trainer = importlib.import_module("skyrl.train.trainer")
    home = importlib.import_module("skyrl.train.dataset.preprocess")
    assert trainer.boundaries(["a"]) == "original"
    with pytest.warns(skyrl.SkyRLFastWarning, match="make_router_padding_mask"):
        report = skyrl.install(ray_workers=False)
    row = report.row("compute_prompt_boundaries")
    assert (row.state, row.version) == ("replaced", "9.9")
    assert set(row.places) == {
        "skyrl.train.dataset.preprocess.compute_prompt_boundaries",
        "skyrl.train.trainer.compute_prompt_boundaries",
    }
    assert trainer.boundaries(["a", "a", "b"]) == [(0, 2), (2, 3)]
    assert home.compute_prompt_boundaries is skyrl.compute_prompt_boundaries
    skyrl.uninstall()
    assert trainer.boundaries(["a"]) == home.compute_prompt_boundaries(["a"]) == "original"
    assert skyrl.report().mode == "" and str(skyrl.report()).endswith("not installed in SkyRL")


def test_unknown_source_is_kept_and_reported(fake_skyrl: Path) -> None:
    with pytest.warns(skyrl.SkyRLFastWarning) as caught:
        report = skyrl.install(ray_workers=False)
    trainer = importlib.import_module("skyrl.train.trainer")
    assert trainer.make_router_padding_mask(None, None) == "another source"
    assert report.row("make_router_padding_mask").state == "kept"
    assert "SkyRL 9.9" in str(caught[0].message)
    assert "make_router_padding_mask" in str(report) and "kept" in str(report)
    assert set(KEPT) <= set(report.names("kept"))


@pytest.mark.spec("dropin.known-source")
@pytest.mark.parametrize(
    ("old", "new", "state"),
    [
        ("isinstance(uids, list)", "isinstance(uids, list | str)", "kept"),
        ("isinstance(uids, tuple)", "isinstance(uids, list | str)", "replaced"),  # not called
        ("isinstance(uids, list)", "isinstance(uids, list)  # only", "replaced"),
    ],
)
def test_function_is_kept_if_one_that_it_calls_has_changed(
    fake_skyrl: Path, old: str, new: str, state: str
) -> None:
    source = fake_skyrl / "skyrl/train/kinds.py"
    assert old in KINDS
    source.write_text(KINDS.replace(old, new))
    with pytest.warns(skyrl.SkyRLFastWarning) as caught:
        report = skyrl.install(ray_workers=False)
    assert report.row("compute_prompt_boundaries").state == state
    assert ("compute_prompt_boundaries" in str(caught[0].message)) == (state == "kept")
    trainer = importlib.import_module("skyrl.train.trainer")
    assert (trainer.boundaries(["a"]) == "original") == (state == "kept")


def test_function_is_kept_if_one_that_it_calls_is_a_users(fake_skyrl: Path) -> None:
    kinds: Any = importlib.import_module("skyrl.train.kinds")
    kinds.is_list = lambda uids: isinstance(uids, list | str)  # as a user's program does
    with pytest.warns(skyrl.SkyRLFastWarning, match="compute_prompt_boundaries"):
        skyrl.install(ray_workers=False)
    trainer = importlib.import_module("skyrl.train.trainer")
    assert trainer.boundaries("a") == "original"


@pytest.mark.spec("dropin.known-source")
@pytest.mark.parametrize(
    ("replaced", "words"),
    [
        ([], "NOTHING IS REPLACED"),
        (["compute_prompt_boundaries"], "ALMOST NOTHING BECOMES FASTER"),
        (["logprobs_from_logits"], "not everything could be replaced"),
    ],
)
def test_warning_is_loudest_where_nothing_becomes_faster(replaced: list[str], words: str) -> None:
    rows = [Row("make_router_padding_mask", "kept", UNKNOWN_SOURCE)]
    rows += [Row(name, "replaced", version="9.9") for name in replaced]
    text = switch.describe_kept(rows, "9.9", [])
    assert text.startswith(f"SkyRL 9.9: {words}")
    assert "the source is unknown: make_router_padding_mask." in text
    assert switch.describe_kept(rows[1:], "9.9", []) == ""


@pytest.mark.spec("dropin.report")
def test_calls_are_counted_and_summed_up_at_the_end(fake_skyrl: Path) -> None:
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "import skyrl_fast.integrations.skyrl as fast\n"
        "from skyrl_fast.integrations.skyrl import switch\n"
        "switch.TARGETS = tuple(t for t in switch.TARGETS if 'boundaries' in t.name)\n"
        "switch.version_label = lambda target, function: '9.9'\n"
        "fast.install(ray_workers=False)\n"
        "from skyrl.train.trainer import boundaries\n"
        "print(boundaries(['a', 'b']), boundaries(['c']))\n"
    )
    path = os.pathsep.join([str(fake_skyrl), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "[(0, 1), (1, 2)] [(0, 1)]\n"
    assert done.stderr.splitlines()[-1] == (
        "skyrl_fast in SkyRL 9.9: 2 calls: compute_prompt_boundaries 2"
    )


@pytest.mark.spec("dropin.wrappers")
def test_user_wrapper_around_a_known_function_is_kept(fake_skyrl: Path) -> None:
    home: Any = importlib.import_module("skyrl.train.dataset.preprocess")
    original = home.compute_prompt_boundaries

    @functools.wraps(original)
    def mine(uids: list[str]) -> str:
        return "mine, then " + original(uids)

    home.compute_prompt_boundaries = mine
    with pytest.warns(skyrl.SkyRLFastWarning, match="compute_prompt_boundaries"):
        report = skyrl.install(ray_workers=False)
    assert report.row("compute_prompt_boundaries").state == "kept"
    trainer = importlib.import_module("skyrl.train.trainer")
    assert trainer.boundaries(["a"]) == "mine, then original"


@pytest.mark.spec("dropin.wrappers")
def test_user_wrapper_in_a_registry_is_kept(
    fake_skyrl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = importlib.import_module("skyrl.train.dataset.preprocess").compute_prompt_boundaries
    decorated = torch.no_grad()(original)
    mine = functools.wraps(original)(lambda uids: "mine")
    functions = {"original": original, "decorated": decorated, "mine": mine}
    module = SimpleNamespace(PolicyLossRegistry=SimpleNamespace(_functions=functions))
    monkeypatch.setitem(sys.modules, PPO, module)  # type: ignore[arg-type]
    with pytest.warns(skyrl.SkyRLFastWarning, match="make_router_padding_mask"):
        skyrl.install(ray_workers=False)
    ours = skyrl.compute_prompt_boundaries
    assert functions == {"original": ours, "decorated": ours, "mine": mine}
    skyrl.uninstall()
    assert functions == {"original": original, "decorated": decorated, "mine": mine}


@pytest.mark.spec("dropin.prior-functions")
def test_uninstall_keeps_replacements_that_users_imported(
    fake_skyrl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = skyrl.compute_prompt_boundaries
    users = ModuleType("users_module")
    users.boundaries = ours  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "users_module", users)
    with pytest.warns(skyrl.SkyRLFastWarning):
        skyrl.install(ray_workers=False)
    skyrl.uninstall()
    assert users.boundaries is ours
    home = importlib.import_module("skyrl.train.dataset.preprocess")
    assert home.compute_prompt_boundaries(["a"]) == "original"


@pytest.mark.spec("dropin.install")
def test_installing_twice_changes_nothing(fake_skyrl: Path) -> None:
    with pytest.warns(skyrl.SkyRLFastWarning):
        first = skyrl.install(ray_workers=False)
    trainer = importlib.import_module("skyrl.train.trainer")
    held = trainer.compute_prompt_boundaries
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = skyrl.install(ray_workers=False)
    assert trainer.compute_prompt_boundaries is held
    assert again.names("replaced") == first.names("replaced")


def test_second_install_can_change_the_workers_option(
    fake_skyrl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray: Any = ModuleType("ray")
    ray.init, ray.is_initialized = lambda **kwargs: kwargs, lambda: False
    ray.shutdown = own = lambda: "shut down"
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.warns(skyrl.SkyRLFastWarning):
        skyrl.install(ray_workers=False)
    assert ray.init() == {}
    for _ in range(2):
        skyrl.install()
        variables = ray.init()["runtime_env"]["env_vars"]
        assert variables == {"SKYRL_FAST_AUTOINSTALL": "compat"}
    assert ray.shutdown is not own and ray.shutdown() == "shut down"
    skyrl.uninstall()
    assert ray.shutdown is own
    skyrl.install(ray_workers=False)
    assert ray.init() == {}


def test_unusual_input_is_passed_to_the_original(fake_skyrl: Path) -> None:
    with pytest.warns(skyrl.SkyRLFastWarning):
        skyrl.install(ray_workers=False)
    trainer = importlib.import_module("skyrl.train.trainer")
    before = skyrl.report().row("compute_prompt_boundaries").counts
    with pytest.raises(KeyError, match="original"):
        trainer.boundaries(3)
    after = skyrl.report().row("compute_prompt_boundaries").counts
    assert after.calls == before.calls + 1 and after.handed_back == before.handed_back + 1
    assert after.last_reason.startswith("TypeError")


@pytest.mark.spec("dropin.ray-workers")
def test_worker_replaces_what_is_imported_later(fake_skyrl: Path) -> None:
    with pytest.warns(skyrl.SkyRLFastWarning, match="make_router_padding_mask"):
        switch.install_on_import()
        assert "skyrl" not in sys.modules and skyrl.report().rows == ()
        trainer = importlib.import_module("skyrl.train.trainer")
    assert trainer.boundaries(["a", "b"]) == [(0, 1), (1, 2)]
    assert skyrl.report().names("replaced") == ["compute_prompt_boundaries"]
    home = sys.modules["skyrl.train.dataset.preprocess"]
    assert type(home.__loader__).__name__ == "SourceFileLoader"
    skyrl.uninstall()
    assert trainer.boundaries(["a"]) == "original"


def test_worker_installs_what_the_environment_variable_lists(
    fake_skyrl: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    modes = []
    for value in ("1", "compat", "0", ""):
        monkeypatch.setenv(ray_workers.VARIABLE, value)
        skyrl.autoinstall()
        modes.append(skyrl.report().mode)
        skyrl.uninstall()
    assert modes == ["compat", "compat", "", ""]
    monkeypatch.setenv(ray_workers.VARIABLE, "fixed:a,b")
    skyrl.autoinstall()
    assert "nothing was installed" in caplog.text and skyrl.report().mode == ""
    assert "expected mode 'compat', got 'fixed:a,b', which was removed" in caplog.text


hook_calls: list[int] = []


def users_hook() -> None:
    hook_calls.append(1)


def test_existing_user_hook_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    env = skyrl.runtime_env(base={"worker_process_setup_hook": "gc.collect", "pip": ["x"]})
    assert env["worker_process_setup_hook"] == ray_workers.AUTOINSTALL and env["pip"] == ["x"]
    assert env["env_vars"] == {
        "SKYRL_FAST_AUTOINSTALL": "compat", "SKYRL_FAST_NEXT_SETUP_HOOK": "gc.collect",
    }  # fmt: skip
    monkeypatch.setenv("SKYRL_FAST_NEXT_SETUP_HOOK", f"{__name__}.users_hook")
    skyrl.autoinstall()
    assert hook_calls == [1]
    with pytest.raises(ValueError, match="import path"):
        skyrl.runtime_env(base={"worker_process_setup_hook": print})


@pytest.mark.spec("dropin.install")
def test_install_without_skyrl_is_an_error(tmp_path: Path) -> None:
    code = "import skyrl_fast.integrations.skyrl as s; s.install()"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules['skyrl'] = None; {code}"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert "SkyRL cannot be imported" in done.stderr


PYDANTIC = """
class PydanticUserError(RuntimeError):
    pass


raise PydanticUserError("Please use typing_extensions.TypedDict on Python < 3.12.\\n\\nMore")
"""


@pytest.mark.spec("dropin.import-error")
@pytest.mark.parametrize("name", ["train/trainer", "train/dataset/preprocess", "__init__"])
def test_skyrl_that_needs_another_python_is_an_error_in_one_line(
    fake_skyrl: Path, name: str
) -> None:
    (fake_skyrl / f"skyrl/{name}.py").write_text(PYDANTIC)
    installed = fake_skyrl / "skyrl-9.9.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: skyrl\nVersion: 9.9\nRequires-Python: ==3.12.*\n")
    with pytest.raises(ImportError) as caught:
        skyrl.install(ray_workers=False)
    message = str(caught.value)
    module = "skyrl" if name == "__init__" else "skyrl.train.trainer"
    assert message.startswith(f"install: {module} of SkyRL ")
    assert (
        f"in Python {platform.python_version()} (SkyRL's package needs Python ==3.12.*)" in message
    )
    assert "PydanticUserError: Please use typing_extensions.TypedDict on Python < 3.12." in message
    advises = message.endswith(" Run SkyRL with Python 3.12 or newer.")
    assert advises == (sys.version_info < (3, 12)) and "\n" not in message
    assert skyrl.report().mode == ""


@pytest.mark.spec("dropin.functions")
def test_functions_act_next_to_a_skyrl_that_cannot_be_imported(fake_skyrl: Path) -> None:
    (fake_skyrl / "skyrl/train/dataset/preprocess.py").write_text(PYDANTIC)
    assert skyrl.compute_prompt_boundaries(["a", "a", "b"]) == [(0, 2), (2, 3)]
    with pytest.raises(ValueError, match="rows: expected those of a prompt next to each other"):
        skyrl.compute_prompt_boundaries(["a", "b", "a"])


def test_other_modes_are_refused() -> None:
    with pytest.raises(ValueError, match="expected mode 'compat', got 'other'"):
        skyrl.install("other")
    with pytest.raises(ValueError, match="got 'fixed', which was removed"):
        skyrl.install("fixed")
    assert skyrl.report().mode == ""


@pytest.mark.spec("dropin.functions")
def test_rloo_of_a_padding_row_is_0_with_a_warning_of_skyrls_logger() -> None:
    loguru = pytest.importorskip("loguru")
    said: list[str] = []
    sink = loguru.logger.add(lambda line: said.append(line.record["message"]))
    rewards, ones = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 7.0]]), torch.ones(3, 2)
    got, _ = skyrl.compute_rloo_outcome_advantage(rewards, ones, ["a", "a", "pad0"])
    loguru.logger.remove(sink)
    assert got.tolist() == [[1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]]
    assert said == ["Only one response for prompt index pad0, setting advantage to 0"]


def test_functions_work_without_skyrl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacement, "find", lambda target: None)  # SkyRL may be installed
    monkeypatch.setattr(replacement, "ORIGINALS", replacement.Originals())
    out = skyrl.convert_prompts_responses_to_batch_tensors(
        0, [[1, 2], [3]], [[4], [5, 6]], [[1.0], [0.0, 1.0]], [[1], [1, 1]]
    )
    assert out[0].tolist() == [[1, 2, 4], [3, 5, 6]] and out[5] is None
    mask = skyrl.make_router_padding_mask(torch.tensor([[0, 1, 1]]), [1])
    assert mask.tolist() == [[True, False, True]]
    rewards, ones = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2, dtype=torch.long)
    grpo, _ = skyrl.compute_grpo_outcome_advantage(rewards, ones, ["a", "a"])
    torch.testing.assert_close(grpo[:, 0], torch.tensor([0.70710, -0.70710]), atol=1e-5, rtol=0)
    rloo, _ = skyrl.compute_rloo_outcome_advantage(rewards, ones, ["a", "a"])
    assert rloo.tolist() == [[1.0, 1.0], [-1.0, -1.0]]
    maxrl, _ = skyrl.compute_maxrl_advantage(rewards, ones, ["a", "b"])
    assert maxrl.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert skyrl.compute_prompt_mini_batch_boundaries(["a", "b"], 1, 2, True, 1) == [(0, 1), (1, 2)]
    scaled = skyrl.apply_loss_reduction_to_advantages_minibatch(
        torch.ones(2, 2), torch.ones(2, 2), "token_mean", 1, 8
    )
    assert scaled.tolist() == [[0.25, 0.25], [0.25, 0.25]]


def test_fingerprint_ignores_only_comments_and_formatting() -> None:
    plain = "def f(a, b=1):\n    return a + b\n"
    same = '''
    def f(a,
          b=1):  # a comment
        """Two lines:

        with a # in them.
        """
        return a + b
    '''
    assert (
        normalize_source(plain)
        == normalize_source(textwrap.dedent(same))
        == "deff(a,b=1):returna+b"
    )
    assert normalize_source(plain) != normalize_source(plain.replace("b=1", "b=2"))
    lines = "def f():\n    x = 'a\u2028b'  # one\n    return x  # two\n"
    assert normalize_source(lines) == "deff():x='ab'returnx"


def test_every_replacement_exists() -> None:
    for target in TARGETS:
        home, _, name = target.replacement.partition(".")
        module = importlib.import_module(f"skyrl_fast.integrations.skyrl.{home}")
        assert callable(getattr(module, name)), target.replacement
        assert name in skyrl.__all__

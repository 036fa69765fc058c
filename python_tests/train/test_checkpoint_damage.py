"""Damaged checkpoints are named and set aside; a run resumes from the newest intact one."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from _fakes import tiny_model
from _training import fill, settings, steady, train
from safetensors.torch import load_file, save_file

from skyrl_fast.config import OptimizerConfig
from skyrl_fast.train.checkpoint.local import (
    CheckpointError,
    newest_intact,
    read_state,
    set_aside,
    verify_checkpoint,
)
from skyrl_fast.train.checkpoint.manifest import (
    SIZES,
    PieceSizes,
    digest_file,
    digest_pieces,
    make_manifest,
)
from skyrl_fast.train.data.random_state import load_random_state, save_random_state
from skyrl_fast.train.model.optimizer import Optimizer
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.run import TrainResult

FILES = (
    "manifest.json",
    "optimizer.safetensors",
    "policy/config.json",
    "policy/generation_config.json",
    "policy/model.safetensors",
    "policy/tokenizer.txt",
    "random.safetensors",
    "state.json",
)
PAGE = 4096


def empty(file: Path, older: Path) -> None:
    file.write_bytes(b"")


def half(file: Path, older: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def one_bit(file: Path, older: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) * 2 // 3] ^= 1
    file.write_bytes(content)


def zeroed_page(file: Path, older: Path) -> None:
    content = bytearray(file.read_bytes())
    start = len(content) // 2 // PAGE * PAGE
    size = min(PAGE, len(content) - start)
    content[start : start + size] = bytes(size)
    file.write_bytes(content)


def of_older(file: Path, older: Path) -> None:
    shutil.copy(older, file)


def missing(file: Path, older: Path) -> None:
    file.unlink()


DAMAGES = (empty, half, one_bit, zeroed_page, of_older, missing)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, TrainResult]]:
    """Return the folder and the result of a run with checkpoints of steps 2, 4 and 6."""
    with pytest.MonkeyPatch.context() as patch:
        folder = fill(tmp_path_factory.mktemp("finished"), patch, num_prompts=8)
        yield folder, train(settings(folder, "run"))


@pytest.fixture
def kept(finished: tuple[Path, TrainResult], tmp_path: Path) -> Path:
    """Return a copy of the run's checkpoints."""
    return Path(shutil.copytree(finished[0] / "run/checkpoints", tmp_path / "checkpoints"))


def test_checkpoint_has_these_files_and_is_intact(kept: Path) -> None:
    newest = kept / "step_000006"
    found = sorted(str(p.relative_to(newest)) for p in newest.rglob("*") if p.is_file())
    assert tuple(found) == FILES
    manifest = json.loads((newest / "manifest.json").read_text())
    assert (manifest["algorithm"], tuple(sorted(manifest["files"]))) == ("xxh3_128", FILES[1:])
    assert newest_intact(kept) == (newest, [])
    (newest / "notes.txt").write_text("files of the user are not compared")
    verify_checkpoint(newest)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_named_and_the_older_checkpoint_found(
    kept: Path, name: str, damage: Callable[[Path, Path], None]
) -> None:
    newest, older = kept / "step_000006", kept / "step_000004"
    before = (newest / name).read_bytes()
    damage(newest / name, older / name)
    if damage is of_older and (newest / name).read_bytes() == before:
        assert newest_intact(kept) == (newest, [])  # both checkpoints have the same file
        return
    with pytest.raises(CheckpointError, match="choose another checkpoint") as error:
        verify_checkpoint(newest)
    # An older checkpoint's manifest is intact; the files are those that differ from it.
    blamed = newest if (name, damage) == ("manifest.json", of_older) else newest / name
    assert str(error.value).startswith(f"checkpoint of step 6 is damaged: {blamed}")
    found, damaged = newest_intact(kept)
    assert found == older
    assert [path for path, _ in damaged] == [newest]


@pytest.mark.spec("async.checkpoint-fallback")
@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (empty, "optimizer.safetensors"),
        (half, "random.safetensors"),
        (one_bit, "policy/model.safetensors"),
        (zeroed_page, "optimizer.safetensors"),
        (of_older, "policy/model.safetensors"),
        (missing, "state.json"),
    ],
)
def test_resume_falls_back_and_ends_like_an_undisturbed_run(
    finished: tuple[Path, TrainResult],
    damage: Callable[[Path, Path], None],
    name: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder, expected = finished
    run = damage.__name__
    shutil.copytree(folder / "run", folder / run)
    newest = folder / run / "checkpoints/step_000006"
    damage(newest / name, newest.with_name("step_000004") / name)
    damaged = (newest / name).read_bytes() if (newest / name).exists() else None
    outcome = train(settings(folder, run, "trainer.resume_mode=latest"))
    aside = newest.with_name("step_000006.damaged")
    for said in (capsys.readouterr().err, caplog.text):
        assert f"step_000006 was renamed to {aside}: checkpoint of step 6 is damaged" in said
        assert str(newest / name) in said
    assert (outcome.step, outcome.checkpoint) == (6, newest)
    assert steady(outcome.metrics) == steady(expected.metrics)
    assert expected.checkpoint is not None
    for file in ("policy/model.safetensors", "optimizer.safetensors"):
        assert (newest / file).read_bytes() == (expected.checkpoint / file).read_bytes()
    left = (aside / name).read_bytes() if (aside / name).exists() else None
    assert left == damaged  # set aside as it was


@pytest.mark.spec("async.checkpoint-fallback")
def test_without_an_intact_checkpoint_nothing_is_renamed(
    finished: tuple[Path, TrainResult],
) -> None:
    folder, _ = finished
    shutil.copytree(folder / "run", folder / "hopeless")
    kept = folder / "hopeless/checkpoints"
    for checkpoint in kept.glob("step_*"):
        one_bit(checkpoint / "random.safetensors", checkpoint)
    metrics = (folder / "hopeless/metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"no intact checkpoint in .*step 6 .*step 4 .*copy"):
        train(settings(folder, "hopeless", "trainer.resume_mode=latest"))
    assert sorted(path.name for path in kept.glob("step_*")) == [
        f"step_00000{n}" for n in (2, 4, 6)
    ]
    assert (folder / "hopeless/metrics.jsonl").read_bytes() == metrics


@pytest.mark.spec("async.checkpoint-digests")
def test_damaged_resume_path_is_refused(finished: tuple[Path, TrainResult]) -> None:
    folder, _ = finished
    shutil.copytree(folder / "run", folder / "chosen")
    chosen = folder / "chosen/checkpoints/step_000004"
    half(chosen / "policy/model.safetensors", chosen)
    config = settings(
        folder, "chosen", "trainer.resume_mode=from_path", f"trainer.resume_path={chosen}"
    )
    with pytest.raises(CheckpointError, match=r"step 4 is damaged: .*model.*expected \d+ bytes"):
        train(config)
    assert (folder / "chosen/checkpoints/step_000006").is_dir()


def digest_of_pieces(*pieces: bytes) -> str:
    digests = b"".join(xxhash.xxh3_128(piece).digest() for piece in pieces)
    return xxhash.xxh3_128(digests).hexdigest()


def test_digest_of_a_file_of_several_pieces(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"abcdefghij")
    (tmp_path / "none").write_bytes(b"")
    with ThreadPoolExecutor(2) as pool:
        digest = digest_file(file, pool, PieceSizes(piece=4, buffer=3))
    assert digest == digest_of_pieces(b"abcd", b"efgh", b"ij")
    files = make_manifest(tmp_path)["files"]
    assert files["file"] == {"bytes": 10, "digest": digest_of_pieces(b"abcdefghij")}
    assert files["none"] == {"bytes": 0, "digest": digest_of_pieces()}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_piece_is_read_by_one_of_several_ranks(tmp_path: Path, size: int) -> None:
    sizes = {"none": 0, "small": 5, "large": 4 * SIZES.piece + 7, "last": SIZES.piece}
    for name, num_bytes in sizes.items():
        with (tmp_path / name).open("wb") as file:
            file.write(name.encode()[:num_bytes])
            file.truncate(num_bytes)
    found = []
    for rank in range(size):
        part = list(digest_pieces(tmp_path, sizes, rank=rank, size=size))
        # All but two of the pieces have as many bytes.
        assert len(part) <= 7 / size + 2
        found += part
    assert len(found) == 7
    files = make_manifest(tmp_path)["files"]
    for name, first, end in (("small", 0, 1), ("large", 1, 6), ("last", 6, 7)):
        digests = b"".join(piece for piece in found[first:end] if isinstance(piece, bytes))
        assert xxhash.xxh3_128(digests).hexdigest() == files[name]["digest"]
    (tmp_path / "large").unlink()
    assert list(digest_pieces(tmp_path, {"large": 9})) == ["missing"]


@pytest.mark.spec("update.ranks-verify")
def test_two_ranks_resume_from_the_newest_intact_checkpoint(
    finished: tuple[Path, TrainResult],
) -> None:
    folder, _ = finished
    shutil.copytree(folder / "run", folder / "ranks")
    newest = folder / "ranks/checkpoints/step_000006"
    one_bit(newest / "optimizer.safetensors", newest)
    shared = settings(
        folder,
        "ranks",
        "trainer.placement.policy_num_gpus_per_node=2",
        "trainer.resume_mode=from_path",
        f"trainer.resume_path={newest}",
    )
    with pytest.raises(CheckpointError, match=r"step 6 is damaged: .*optimizer\.safetensors: its"):
        train(shared)
    # In the same process: the ranks of the refused run had connected to nothing.
    shared.trainer.resume_mode = "latest"
    outcome = train(shared)
    assert (outcome.step, outcome.checkpoint) == (6, newest)
    assert newest.with_name("step_000006.damaged").is_dir()


def test_set_aside_never_replaces(tmp_path: Path) -> None:
    for expected in ("step_000003.damaged", "step_000003.damaged-2", "step_000003.damaged-3"):
        (tmp_path / "step_000003").mkdir()
        assert set_aside(tmp_path / "step_000003", "damaged") == tmp_path / expected
    assert newest_intact(tmp_path) == (None, [])


def change_state(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the state, with a manifest that belongs to it."""
    state = json.loads((checkpoint / "state.json").read_text())
    change(state)
    (checkpoint / "state.json").write_text(json.dumps(state))
    (checkpoint / "manifest.json").unlink()
    (checkpoint / "manifest.json").write_text(json.dumps(make_manifest(checkpoint)))


@pytest.mark.spec("async.checkpoint-unlisted")
def test_checkpoint_without_manifest_is_damaged(kept: Path) -> None:
    newest = kept / "step_000006"
    (newest / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"step 6 is damaged: .*manifest\.json: missing"):
        verify_checkpoint(newest)
    assert newest_intact(kept)[0] == kept / "step_000004"


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Return a function that sets the value at the path of keys; the last item is the value."""
    *keys, last, value = path

    def change(state: Any) -> None:
        for key in keys:
            state = state[key]
        state[last] = value

    return change


@pytest.mark.spec("async.checkpoint-state")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.clear(), "step: expected an integer from 0 .*got None"),
        (lambda state: state.pop("sampler"), "sampler: expected an object, got None"),
        (lambda state: state["sampler"].pop("seed"), "seed: expected an integer .*got None"),
        (lambda state: state.pop("random"), "random: expected an object, got None"),
        (put("step", -1), "step: expected an integer from 0 .* got -1"),
        (put("step", [6]), r"step: expected an integer .* got \[6\]"),
        (put("step", True), "step: expected an integer .* got True"),
        (put("step", math.nan), "step: expected an integer .* got nan"),
        (put("step", 10**400), "step: expected an integer .* got 1000"),
        (put("sampler", []), r"sampler: expected an object, got \[\]"),
        (put("sampler", "position", -3), "position: expected an integer from 0 to 7, got -3"),
        (put("sampler", "position", 8), "position: expected an integer from 0 to 7, got 8"),
        (put("sampler", "epoch", -1), "epoch: expected an integer from 0 .* got -1"),
        (put("sampler", "epoch", 10**30), "epoch: expected an integer from 0 .* got 1000"),
        (put("sampler", "batch_size", 0), "batch_size: expected an integer from 1 to 8, got 0"),
        (put("sampler", "num_prompts", 2.5), "num_prompts: expected an integer .* got 2.5"),
        (put("epochs_used_up", -1), "epochs_used_up: expected an integer .* got -1"),
        (put("config", []), r"config: expected an object, got \[\]"),
        (put("config", {"trainer": 3}), "trainer: expected an object, got 3"),
        (put("config", {"trainer": {"epochs": "x"}}), "epochs: expected an integer .* got 'x'"),
        (
            put("config", {"trainer": {"max_training_steps": [1]}}),
            r"max_training_steps: expected an integer .* got \[1\]",
        ),
        (put("kl_coef", math.nan), "kl_coef: expected a finite number, got nan"),
        (put("kl_coef", 10**400), "kl_coef: expected a finite number, got 1000"),
        (put("kl_coef", [0.1]), r"kl_coef: expected a finite number, got \[0.1\]"),
        (put("unreported", [1]), r"unreported: expected an object, got \[1\]"),
        (put("unreported", {"loss": [1]}), r"unreported.loss: expected a number, got \[1\]"),
        (put("unreported", {"loss": 10**400}), "unreported.loss: expected a number, got 1000"),
        (put("random", "python", [3, [1], None]), r"random.python\[1\]: expected a list of 625"),
        (put("random", "python", 1, 0, 2**32), r"random.python\[1\]: expected integers of 32 bits"),
        (
            put("random", "python", 1, -1, 625),
            r"random.python\[1\]\[-1\]: expected .*from 0 to 624",
        ),
        (put("random", "python", 0, 4), r"random.python\[0\]: expected 3, got 4"),
        (put("random", "numpy", {}), "random.numpy: expected a list of 5 values"),
        (put("random", "numpy", 2, 10**6), r"random.numpy\[2\]: .* from 0 to 624, got 1000000"),
        (put("random", "numpy", 4, math.nan), r"random.numpy\[4\]: expected a finite number"),
    ],
)
def test_impossible_state_is_damage(
    kept: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    newest = kept / "step_000006"
    change_state(newest, change)
    with pytest.raises(CheckpointError, match=rf"step 6 is damaged: .*state.json: .*{message}"):
        read_state(newest)
    assert newest_intact(kept)[0] == kept / "step_000004"


@pytest.mark.parametrize(
    "text", ["[1]", "null", "[" * 100_000, "\x00" * 8, '{"step": ' + "1" * 5000]
)
def test_state_of_another_form_is_damage(kept: Path, text: str) -> None:
    (kept / "step_000006/state.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"step 6 is damaged: .*state\.json: "):
        read_state(kept / "step_000006")


def trained_optimizer() -> tuple[Optimizer, str]:
    """Return an optimizer after one step, and the name of a parameter."""
    model = tiny_model()
    optimizer = Optimizer(
        Policy(model, temperature=1.0, max_tokens_per_microbatch=64),
        OptimizerConfig(),
        total_steps=10,
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer, next(name for name, _ in model.named_parameters())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("exp_avg", math.nan, "exp_avg: expected numbers, got NaN"),
        ("exp_avg_sq", math.nan, "exp_avg_sq: expected no negative values, and no NaN"),
        ("exp_avg_sq", -1.0, "exp_avg_sq: expected no negative values, and no NaN"),
        ("step", -1.0, "step: expected no negative values, and no NaN"),
        ("exp_avg_sq", None, ": no exp_avg_sq"),
        ("step", None, ": no step"),
        ("step_count", "-1", r"step_count: expected 0 to 2\^53, got -1"),
        ("step_count", str(10**30), r"step_count: expected 0 to 2\^53, got 1000"),
        ("step_count", "[1]", "no optimizer state: ValueError"),
        ("step_count", None, "no optimizer state: KeyError: 'step_count'"),
        ("without_gradient", "[" * 100_000, "no optimizer state: RecursionError"),
    ],
)
def test_impossible_optimizer_state_is_damage(
    tmp_path: Path, key: str, value: Any, message: str
) -> None:
    optimizer, name = trained_optimizer()
    path = tmp_path / "step_000012/optimizer.safetensors"
    path.parent.mkdir()
    optimizer.save(path.parent)
    tensors, metadata = load_file(str(path)), {"step_count": "1"}
    if key == "step_count":
        metadata = {"step_count": value} if value is not None else {"other": "1"}
    elif key == "without_gradient":
        metadata[key] = value
    elif value is None:
        del tensors[f"{name}.{key}"]
    else:
        tensors[f"{name}.{key}"].view(-1)[-1] = value
    save_file(tensors, str(path), metadata=metadata)
    with pytest.raises(CheckpointError, match=f"step 12 is damaged: .*optimizer.*{message}"):
        optimizer.load(path.parent)


@pytest.mark.parametrize("states", [{}, {"torch": torch.zeros(3, dtype=torch.uint8)}])
def test_impossible_random_state_is_damage(tmp_path: Path, states: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "random.safetensors"
    others = save_random_state(path)
    save_file(states, str(path))
    with pytest.raises(CheckpointError, match=r"damaged: .*random.safetensors: no random states"):
        load_random_state(path, others)

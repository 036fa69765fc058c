"""The Triton kernels: in Triton's interpreter, and compiled if there is a GPU."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_fast import selected_logprob
from skyrl_fast.ops.policy_loss.losses import LOSS_CODES, POLICY_LOSSES

FOLDER = Path(__file__).parents[1] / "helpers"
CASES = [str(FOLDER / f"triton_{name}.py") for name in ("cases", "loss_cases", "first_use")]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def run_cases(environment: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CASES, *options]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=FOLDER.parents[1]
    )


def triton_and_numpy() -> list[tuple[int, ...]]:
    """Return the major and minor version of both."""
    return [tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy")]


@needs_triton
@pytest.mark.parametrize("cases", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_kernels_in_the_interpreter(cases: str) -> None:
    """In a separate process: Triton decides at import how kernels run."""
    triton, numpy = triton_and_numpy()
    if triton < (3, 7) and numpy >= (2, 4):
        pytest.skip("Triton's interpreter before 3.7 does not run with NumPy 2.4 or newer")
    interpreted = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = run_cases(interpreted, "-m", cases)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


@needs_triton
@pytest.mark.gpu
def test_kernels_compiled() -> None:
    compiled = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = run_cases(compiled, "-m", "slow or not slow")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


# Types of the kernels' arguments by name; all others are compile-time constants.
TYPES = dict.fromkeys(("logits", "grad"), "*bf16") | {
    **dict.fromkeys(("targets",), "*i64"),
    **dict.fromkeys(("mask", "selected_in"), "*u8"),
    **dict.fromkeys(("lse_out", "lse_in", "sequence_delta", "partial", "metrics", "sums"), "*fp64"),
    **dict.fromkeys(
        ("logprob_out", "entropy_out", "entropy_in", "grad_logprob_in", "grad_entropy_in"), "*fp32"
    ),
    **dict.fromkeys(
        ("old_logprobs_in", "advantage_in", "reference_in", "token_weight_in"), "*fp32"
    ),
    **dict.fromkeys(("weight_in", "logprobs", "advantages", "reference"), "*fp32"),
    **dict.fromkeys(("row_weights", "token_weights", "a", "b", "grad_out", "out"), "*fp32"),
    **dict.fromkeys(("cross_entropy_weight_in", "kl_weight_in"), "*fp32"),
    **dict.fromkeys(("cross_entropy_weights", "kl_weights"), "*fp32"),
    **dict.fromkeys(("cu", "kept_ids"), "*i32"),
    **dict.fromkeys(("kept_ranges",), "*i64"),
    **dict.fromkeys(("vocab", "num_kept", "inner", "width", "num_rows", "count"), "i32"),
    **dict.fromkeys(("outer_stride", "inner_stride", "num_cells"), "i64"),
    **dict.fromkeys(("grad_outer_stride", "grad_inner_stride"), "i64"),
    **dict.fromkeys(("scale", "inv_temperature", "low", "high", "ratio_c"), "fp32"),
    **dict.fromkeys(("tau_pos", "tau_neg", "delta_low", "delta_high"), "fp32"),
    **dict.fromkeys(("ppo_kl_coef", "kl_coef"), "fp32"),
}


class Translated(Exception):  # noqa: N818
    """A kernel has passed Triton's front end."""


def compiled(
    name: str,
    capability: int,
    *,
    aligned: bool = False,
    front_end: bool = False,
    **constants: object,
) -> Any:
    """Return a compiled kernel; options that are not given are True, other constants None.

    Args:
        aligned: whether pointers to logits and gradient are multiples of 16 bytes.
        front_end: raise `Translated` before the passes that do not depend on the source, which
            take five sixths of the time.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    class FrontEnd(ASTSource):
        def make_ir(self, *arguments: Any) -> Any:
            super().make_ir(*arguments)
            raise Translated

    from skyrl_fast.ops.logprob import triton_kernels
    from skyrl_fast.ops.policy_loss import triton_kernels as triton_losses

    kernel = getattr(triton_kernels, name, None) or getattr(triton_losses, name)
    names = kernel.arg_names
    options = ("HAS_", "SAME_")
    chosen = {n: constants.get(n, n.startswith(options) or None) for n in names if n not in TYPES}
    source = (FrontEnd if front_end else ASTSource)(
        fn=kernel,
        signature={n: TYPES.get(n, "constexpr") for n in names},
        constexprs={(names.index(n),): value for n, value in chosen.items()},
        attrs={
            (names.index(n),): [["tt.divisibility", 16]]
            for n in ("logits", "grad")
            if aligned and n in names
        },
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": 8 if aligned else 4})


def assembled(name: str, capability: int, **constants: object) -> bool:
    """Return whether a kernel has machine code."""
    return bool(compiled(name, capability, **constants).asm["cubin"])


def translated(name: str, capability: int, **constants: object) -> bool:
    """Return whether the front end takes a kernel: types, constants, names."""
    try:
        compiled(name, capability, front_end=True, **constants)
    except Translated:
        return True
    return False


ACCEPTED = [translated, pytest.param(assembled, marks=pytest.mark.slow)]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's compiler with an empty cache."""
    if triton_and_numpy()[0] < (3, 3):
        pytest.skip("Triton before 3.3 describes a kernel's arguments in another way")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@needs_triton
@pytest.mark.usefixtures("compiler")
def test_front_end_refuses_what_the_interpreter_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert translated("kl_kernel", 90, KL=4, BLOCK=512)
    monkeypatch.setitem(TYPES, "logprobs", "*fp16x")
    with pytest.raises(Exception, match="fp16x"):
        translated("kl_kernel", 90, KL=4, BLOCK=512)


@needs_triton
@pytest.mark.parametrize(
    ("accepted", "capability"),
    [
        (translated, 90),
        *(pytest.param(assembled, c, marks=pytest.mark.slow) for c in (80, 90, 100, 120)),
    ],
)
@pytest.mark.usefixtures("compiler")
def test_kernels_compile_for_other_gpus(accepted: Callable[..., bool], capability: int) -> None:
    """All losses and penalties for one of them, one of each for the others."""
    kinds = [(loss, 4) for loss in LOSS_CODES.values()] + [(0, kl) for kl in range(4)]
    token_losses = {
        code
        for spec in POLICY_LOSSES.values()
        if spec.scope == "token"
        for code in spec.codes.values()
    }
    for loss, kl in kinds if capability == 90 else [(9, 4)]:
        both = dict(LOSS=loss, KL=kl)
        if loss in token_losses:  # the same function of a token in both kernels
            assert accepted("masked_loss_kernel", capability, **both, BLOCK=512)
        if loss not in token_losses or kl < 4:
            assert accepted("loss_kernel", capability, **both, RAGGED=loss > 4, STEPS=9, BLOCK=512)
    assert accepted("forward_kernel", capability, BLOCK=4096)
    assert accepted("backward_kernel", capability, BLOCK=4096)
    assert accepted("fold_kernel", capability, LOSS=5, BLOCK=512)
    assert accepted("kl_kernel", capability, KL=4, BLOCK=512)
    assert accepted("delta_kernel", capability, RAGGED=True, BLOCK=512)


OPTIONS = {
    "forward_kernel": ("HAS_MASK", "HAS_KEPT", "HAS_ENTROPY"),
    "backward_kernel": ("HAS_MASK", "HAS_KEPT", "HAS_LOGPROB", "HAS_ENTROPY", "SAME_ROWS"),
    "masked_loss_kernel": (
        "HAS_MASK", "HAS_KEPT", "HAS_OLD", "HAS_ADVANTAGE", "HAS_TOKEN_WEIGHT",
        "HAS_CROSS_ENTROPY", "HAS_KL_WEIGHT", "HAS_ENTROPY", "HAS_GRAD", "SAME_ROWS",
    ),
}  # fmt: skip


@needs_triton
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("accepted", ACCEPTED)
@pytest.mark.parametrize("name", list(OPTIONS))
def test_kernels_compile_without_an_option(name: str, accepted: Callable[..., bool]) -> None:
    """A branch that an option leaves out must not be compiled; the interpreter does not notice."""
    for option in OPTIONS[name]:
        assert accepted(name, 90, LOSS=10, KL=0, BLOCK=512, **{option: False})
    assert accepted(name, 90, LOSS=10, KL=0, BLOCK=512, **dict.fromkeys(OPTIONS[name], False))


FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]+)"')
PLACE = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)")
ACCESS = re.compile(r"(ld\.global|st\.global|bar\.sync)[\w.:]*")


def accesses(kernel: Any) -> list[tuple[str, str]]:
    """Return each access of global memory and each barrier, with its line of the source."""
    from skyrl_fast.ops.logprob import triton_kernels

    lines = Path(triton_kernels.__file__).read_text().splitlines()
    ptx = kernel.asm["ptx"]
    files = {int(number): Path(path).parent.name for number, path in FILE.findall(ptx)}
    found, line = [], ""
    for text in ptx.splitlines():
        if place := PLACE.match(text):
            is_ours = files[int(place.group(1))] == "logprob"
            line = lines[int(place.group(2)) - 1].strip() if is_ours else ""
        elif access := ACCESS.search(text):
            found.append((access.group(), line))
    return found


@needs_triton
@pytest.mark.usefixtures("compiler")
@pytest.mark.spec("logprob.in-place")
@pytest.mark.parametrize("has_kept", [False, True])
def test_target_is_read_before_a_barrier_and_the_gradient_is_written_after_it(
    has_kept: bool,
) -> None:
    """In place, a warp ahead would overwrite the logit that another has yet to read."""
    options = dict(LOSS=0, KL=4, BLOCK=4096, HAS_KEPT=has_kept, aligned=True)
    found = accesses(compiled("masked_loss_kernel", 90, **options))
    reads = [i for i, (_, line) in enumerate(found) if "logits + first + target" in line]
    writes = [i for i, (_, line) in enumerate(found) if re.match(r"tl.store\((grad|out) \+", line)]
    barriers = [i for i, (name, _) in enumerate(found) if name.startswith("bar")]
    assert reads and writes and barriers
    assert any(max(reads) < barrier < min(writes) for barrier in barriers)


@needs_triton
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("name", "loads", "stores"),
    [("forward_kernel", 2, 0), ("backward_kernel", 2, 4), ("masked_loss_kernel", 4, 4)],
)
def test_rows_of_any_vocabulary_move_in_vectors(name: str, loads: int, stores: int) -> None:
    """4,096 bfloat16 of 8 warps: two loads of 16 bytes a pass; two stores of numbers, of zeros."""
    kernel = compiled(name, 90, aligned=True, LOSS=0, KL=4, BLOCK=4096, HAS_KEPT=False)
    names = [name for name, _ in accesses(kernel)]
    assert names.count("ld.global.v4.b32") == loads
    assert names.count("st.global.v4.b32") == stores


def test_triton_on_the_cpu_requires_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="backend 'triton' cannot run on cpu"):
        selected_logprob(torch.zeros(1, 4), torch.tensor([0]), backend="triton")

"""Fixtures shared by all test modules."""

import asyncio
import gc
import importlib.util
import inspect
import os
from collections.abc import Iterator
from pathlib import Path

import _process
import pytest
import torch
from _emulation import cuda_on_cpu, emulated_gpu, gpu  # noqa: F401
from hypothesis import settings

# Tiny models are fastest on one thread; kernels divide their work among two.
OPS_THREADS = 2
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start

WAITING = (
    *("test_rank_processes.py", "test_ranks.py", "test_rank_checkpoints.py"),
    *("test_sequence_ranks.py", "test_policies.py", "test_triton.py", "test_parent_watch.py"),
)

# Timings on shared machines vary; a slow example is not a failure.
settings.register_profile("default", deadline=None, max_examples=60)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude imported modules and collected tests from garbage collection.

    They live until the end. Scanning them takes a third of the collection's time, and 0.7 s of
    every `gc.collect()` afterwards.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let modules be freed when the interpreter exits, as some warn of what is not.

    First in, last out: before, pytest collects twice, in search of unraisable exceptions.
    """
    config.add_cleanup(gc.unfreeze)
    _process.is_worker = hasattr(config, "workerinput")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with tests that wait for processes, so that none of them is left over at the end.

    GPU tests are skipped, with a reason, if there is no GPU, and those of vLLM without it.
    """
    items.sort(key=lambda item: not (item.get_closest_marker("vllm") or item.path.name in WAITING))
    reasons = {
        "gpu": None if torch.cuda.is_available() else "no NVIDIA GPU here",
        "vllm": None if importlib.util.find_spec("vllm") else "vLLM is not installed",
    }
    for name, reason in reasons.items():
        for item in items:
            if reason and item.get_closest_marker(name):  # keywords hold names of folders too
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Start one process more than there are cores: some tests wait for others."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Set torch's number of threads, before any fixture."""
    torch.set_num_threads(OPS_THREADS if {"ops", "gpu"} & set(item.path.parts) else 1)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(params=["native", "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    """Return each backend that runs on the CPU."""
    return request.param


@pytest.fixture(scope="session")
def tiny_tokenizer() -> object:
    """A byte-level tokenizer without merges: one token per byte, plus three special ones."""
    from bench._tokenizer import byte_level_tokenizer

    return byte_level_tokenizer()


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: object) -> Path:
    """A folder with a Qwen2 model of random weights (0.1 M parameters) and its tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tiny-qwen2"
    tiny_tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tiny_tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=tiny_tokenizer.eos_token_id,
        pad_token_id=tiny_tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(folder)
    return folder

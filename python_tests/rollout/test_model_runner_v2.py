"""What weight updates use of vLLM's worker and its model runners; the second one is for GPUs."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _probe_sweep import ModelKind, make_model

from skyrl_fast.commands import doctor
from skyrl_fast.rollout.engine.vllm_patches import describe_patches
from skyrl_fast.rollout.engine.vllm_patches.kept_logprobs import return_kept_only
from skyrl_fast.rollout.engine.vllm_patches.seeded_sampling import sample_by_inversion
from skyrl_fast.rollout.engine.weights import worker
from skyrl_fast.rollout.engine.weights.receipt import tensor_digest
from skyrl_fast.rollout.engine.weights.transports.file import send_by_file
from skyrl_fast.rollout.engine.weights.worker import WeightUpdateExtension

HELPERS = Path(__file__).resolve().parent.parent / "helpers"
ROOT = HELPERS.parent.parent


def method(file: str, owner: str, name: str) -> ast.FunctionDef:
    """The source of a method, without an import of vLLM."""
    (folder,) = importlib.util.find_spec("vllm").submodule_search_locations
    tree = ast.parse((Path(folder) / file).read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner]
    (result,) = [n for n in found.body if isinstance(n, ast.FunctionDef) and n.name == name]
    return result


@pytest.mark.vllm
def test_worker_reloads_with_the_config_set() -> None:
    reload = method("v1/worker/gpu_worker.py", "Worker", "reload_weights")
    assert ast.unparse(reload.args) == "self, *args, **kwargs"
    (body,) = reload.body
    assert ast.unparse(body) == (
        "with set_current_vllm_config(self.vllm_config):\n"
        "    self.model_runner.reload_weights(*args, **kwargs)"
    )


@pytest.mark.vllm
def test_both_model_runners_take_an_iterator_of_weights() -> None:
    first = method("v1/worker/gpu_model_runner.py", "GPUModelRunner", "reload_weights")
    assert [argument.arg for argument in first.args.args][:3] == [
        *("self", "weights_iterator", "weights_path")
    ]
    assert len(first.args.defaults) == len(first.args.args) - 1
    second = method("v1/worker/gpu/model_runner.py", "GPUModelRunner", "reload_weights")
    names = [argument.arg for argument in second.args.args]
    assert "weights_iterator" in names or second.args.kwarg is not None
    for file in ("v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py"):
        assert ast.unparse(method(file, "GPUModelRunner", "get_model").args) == "self"


class Worker(WeightUpdateExtension):
    """vLLM's worker: its kernels ask for the config while weights are processed."""

    def __init__(self) -> None:
        self.config_is_set = False
        self.model = torch.nn.Linear(2, 1, bias=False)
        self.model.load_weights = self._take  # type: ignore[assignment]
        self.model_config = SimpleNamespace(dtype=torch.bfloat16)
        self.model_runner = SimpleNamespace(
            get_model=lambda: self.model, reload_weights=self._runner_reload
        )

    @contextmanager
    def _config(self) -> Iterator[None]:
        self.config_is_set = True
        yield
        self.config_is_set = False

    def reload_weights(self, **options: Any) -> None:  # type: ignore[override]
        with self._config():
            self.model_runner.reload_weights(**options)

    def _runner_reload(self, *, weights_iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        assert self.config_is_set, "Current vLLM config is not set"
        self.model.load_weights(weights_iterator)

    def _take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        self.model.load_state_dict(dict(weights))
        return {"weight"}


@pytest.mark.spec("sync.receipts")
def test_config_is_set_while_weights_are_processed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "renew_packed_weights", lambda model: nullcontext())
    one, weight = Worker(), torch.tensor([[1.0, 2.0]])
    with send_by_file({"weight": weight}) as call:
        receipt = one.load_weights_file(*call.arguments)
    assert receipt == {
        "digests": {"weight": tensor_digest(weight)},
        "unloaded": [],
        "dtype": "bfloat16",
    }
    assert torch.equal(one.model.weight, weight)


def samplers(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The samplers of vLLM's model runners V1 and V2, on a CPU."""
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu import buffer_utils, states
    from vllm.v1.worker.gpu.sample import sampler as second

    # There is no pinned memory without a GPU.
    monkeypatch.setattr(buffer_utils, "UvaBuffer", buffer_utils.NonUvaBuffer)
    cpu = torch.device("cpu")
    requests = states.RequestState(4, 16, 32, 0, 32, cpu)
    return Sampler(), second.Sampler(4, 32, cpu, requests)


@pytest.mark.vllm
@pytest.mark.spec("sync.patches-named")
def test_patches_of_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = samplers(monkeypatch)
    before = dict(vars(second))
    for patch in (return_kept_only, sample_by_inversion):
        assert patch(first) is True
        assert patch(second) is False
    assert vars(second) == before

    answers = []
    for sampler in samplers(monkeypatch):
        one: Any = WeightUpdateExtension()
        one.device = torch.device("cuda")
        one.model_runner = SimpleNamespace(sampler=sampler)
        answers.append(one.apply_patches())
        assert one.apply_patches() == answers[-1]  # a trainer that connects again
    assert answers == [
        {"kept_logprobs": True, "seeded_sampling": False},
        {"kept_logprobs": False, "seeded_sampling": False},
    ]
    said = "vLLM's patches in use: none; not in use: kept_logprobs, seeded_sampling"
    assert describe_patches(answers[1:]) == said
    assert describe_patches(answers) == said  # of all workers


def test_doctor_names_the_patches_of_the_machine() -> None:
    versions = {"vllm": "0.30.0"}
    for has_gpu, text in ((False, "in use, with model runner V1"), (True, "not in use with model")):
        (finding,) = doctor.vllm_patches(versions.get, has_gpu=has_gpu)
        assert finding.found.startswith("kept_logprobs, seeded_sampling: ")
        assert text in finding.found


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs it without an interpreter")
def test_weights_reach_the_second_model_runner(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """On the CPU, in Triton's interpreter."""
    pytest.importorskip("triton")
    make_model(ModelKind(2, 2.5), seed=0).save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    subprocess.run(
        [sys.executable, str(HELPERS / "_v2_engine.py"), str(tmp_path)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (HELPERS / "triton_on_cpu", HELPERS, ROOT))),
            "TRITON_INTERPRET": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "1",
        },
        check=True,
    )
    assert "Using V2 Model Runner" in (tmp_path / "engine.log").read_text()
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["difference"] < 1e-3 < result["change"]
    assert result["generated"] == pytest.approx(result["trainer"], abs=1e-3)

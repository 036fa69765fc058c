"""GPUs that are pretended, and models and settings to plan for them."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.published_models import model_folder
from skyrl_fast.commands.plan import num_bytes
from skyrl_fast.config import Config
from skyrl_fast.config.loading import load_config
from skyrl_fast.train.memory import measurements
from skyrl_fast.train.memory.device_plan import MemoryPlan
from skyrl_fast.train.setup import model_checks

GPU = num_bytes("79GiB")  # of an "80 GB" GPU
IPC = "generator.inference_engine.weight_sync_backend=ipc"
STAYS = "trainer.policy.optimizer_config.offload_after_step=false"


@dataclasses.dataclass(frozen=True)
class FakeGpus:
    """GPUs of these sizes, all free by default."""

    sizes: tuple[int, ...] = (GPU,)
    free: tuple[int, ...] | None = None
    fault: str = ""

    def free_bytes(self, gpu: int) -> int:
        return (self.free or self.sizes)[gpu]

    def ipc_fault(self) -> str:
        return self.fault


def plan_on(
    gpus: FakeGpus, config: Config, checkpoint: Path | None = None, *, with_engine: bool = True
) -> MemoryPlan | None:
    return model_checks.plan_run_memory(config, checkpoint, with_engine=with_engine, gpus=gpus)


@pytest.fixture(scope="module", autouse=True)
def measured_once() -> Iterator[None]:
    """Measure each model and setting once; the tests plan most of them again."""

    def remembering(measure: Callable[..., Any]) -> Callable[..., Any]:
        found: dict[str, Any] = {}

        def remembered(config: Any, *arguments: Any, **options: Any) -> Any:
            key = f"{config.to_json_string()} {arguments} {options}"
            if key not in found:
                found[key] = measure(config, *arguments, **options)
            return found[key]

        return remembered

    with pytest.MonkeyPatch.context() as patch:
        for name in ("activation_memory", "model_size"):
            patch.setattr(measurements, name, remembering(getattr(measurements, name)))
        yield


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("small"), "Qwen/Qwen2.5-0.5B-Instruct")


def config_of(model: Path, *overrides: str) -> Config:
    names = ["data.train_data=[none]", f"trainer.policy.model.path={model}"]
    return load_config(None, [*names, *overrides])


def sizes(plan: MemoryPlan, device: int = 0) -> dict[str, int]:
    return {item.name: item.num_bytes for item in plan.devices[device].items}

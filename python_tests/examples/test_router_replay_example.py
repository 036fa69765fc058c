"""The measurement of examples/router_replay, on tokens sampled by the model itself."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("skyrl_gym")

from examples.router_replay import run
from examples.router_replay.make_model import NUM_LAYERS, TOP_K, make_model
from skyrl_fast.batch import StepBatch
from skyrl_fast.train.model.loading import load_model
from skyrl_fast.train.model.policy import Policy


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("example") / "model"
    make_model(folder)
    return folder


def sampled_batch(model: Any) -> StepBatch:
    """Return eight rows of random tokens with the model's routes and log-probabilities."""
    random = np.random.default_rng(0)
    prompts = [random.integers(4, 100, 12).tolist() for _ in range(8)]
    responses = [random.integers(4, 100, 10).tolist() for _ in range(8)]
    ids = torch.tensor([p + r for p, r in zip(prompts, responses, strict=True)])
    routes = run.chosen_experts(model, ids).unflatten(0, tuple(ids.shape))
    output: dict[str, Any] = {
        "prompt_token_ids": prompts,
        "response_ids": responses,
        "loss_masks": [[1] * 10] * 8,
        "rewards": [0.0] * 8,
        "rollout_logprobs": [[0.0] * 10] * 8,
        "rollout_expert_indices": [r[:-1].numpy().astype(np.uint8) for r in routes],
    }
    batch = StepBatch.from_generator_output(output, uids=[str(i) for i in range(8)])
    return batch.with_(rollout_logprobs=Policy(model).batch_logprobs(batch))


def test_replay_is_exact_without_noise_and_closer_with_noise(model_folder: Path) -> None:
    model = load_model(str(model_folder), device=torch.device("cpu"))
    batch = sampled_batch(model)
    assert batch.expert_indices.shape == (8 * 21, NUM_LAYERS, TOP_K)
    results = list(run.measure(model_folder, batch))
    assert [(r.trainer, r.replay) for r in results[:4]] == [
        ("noise 0", False),
        ("noise 0", True),
        ("noise 0.003", False),
        ("noise 0.003", True),
    ]
    assert results[0].largest < 1e-5  # the same weights: rounding
    assert results[1].largest < 1e-5
    by_name = {(r.trainer, r.replay): r for r in results}
    for noise in ("noise 0.03", "noise 0.1"):
        free, replayed = by_name[noise, False], by_name[noise, True]
        assert replayed.mean < 0.7 * free.mean
        assert replayed.kl < free.kl
    shares = [
        run.rerouted_share(run.with_noisy_routers(model, noise, seed=1), batch)
        for noise in (0.0, 0.1, 0.3)
    ]
    assert shares[0] == 0.0 < shares[1] < shares[2] < 0.5
    text = run.table(results, {"noise 0": 0.0})
    assert text.count("\n") == 1 + len(run.NOISE_LEVELS) + 1
    assert "| bfloat16 | - |" in text

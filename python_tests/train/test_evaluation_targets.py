"""`evaluate` on real vLLM: a model, its export and a server score the same, token by token."""

import json
from pathlib import Path
from typing import Any

import pytest
from _served import plain_server

from skyrl_fast.train import evaluate
from skyrl_fast.trajectory_store import read_trajectories

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_PROMPTS = 6
ROUNDING = 1e-5  # float32; what the engine batches together differs


def count_vowels(answer: str, row: Any) -> float:
    return sum(answer.count(vowel) for vowel in row["vowels"]) / max(1, len(answer))


def sampled(folder: Path) -> list[tuple[list[int], list[float]]]:
    return [
        (step.response_ids, step.rollout_logprobs.tolist())
        for trajectory in read_trajectories(folder, phase="eval")
        for step in trajectory.steps
    ]


def test_a_server_scores_what_its_model_does(tiny_model_folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"question {n}", "vowels": "aeiou"} for n in range(NUM_PROMPTS)]
    data = tmp_path / "val.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "data.val_data": [str(data)],
        "trainer.policy.model.path": str(tiny_model_folder),
        "trainer.device": "cpu",
        "generator.max_input_length": 128,
        "generator.sampling_params.max_generate_length": 32,
        "generator.eval_sampling_params": {"max_generate_length": 32, "temperature": 0.0},
        "generator.inference_engine.model_dtype": "float32",
        "generator.inference_engine.num_threads": 1,
    }
    with plain_server(tiny_model_folder, tmp_path / "server.log") as url:
        of_model, of_server = evaluate(
            config, [tiny_model_folder, url], out=tmp_path / "out", reward=count_vowels
        )
    assert of_server.scores == of_model.scores
    assert of_server.difference(of_model) == (0.0, 0.0)
    assert len(set(of_model.scores.values())) > 1
    here = sampled(of_model.folder)
    there = sampled(of_server.folder)
    assert len(here) == NUM_PROMPTS
    for (tokens, logprobs), (tokens_there, logprobs_there) in zip(here, there, strict=True):
        assert tokens_there == tokens
        assert logprobs_there == pytest.approx(logprobs, abs=ROUNDING)

"""One failing test for each diff: `test_<name>` fails before `<name>.diff` and passes after."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock, patch

import numpy as np
import pytest
import torch

from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.utils.torch_utils import logprobs_from_logits_v2
from skyrl.train.config import ChatTemplateConfig, GeneratorConfig
from skyrl.train.generators.base import TrajectoryID
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl.train.generators.utils import concatenate_generator_outputs, merge_stepwise_output
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.trainer_utils import (
    handle_filter_sampling,
    handle_replace_sampling,
    validate_generator_output,
)

EOS, LIMIT = 4, 24
RESPONSE = [10, 11, 12]


class Env:
    """An environment whose observations become longer; done after `last` turns."""

    def __init__(self, last: int) -> None:
        self.turns, self.last = 0, last

    def init(self, prompt: Any) -> Any:
        return prompt, {}

    def step(self, action: str) -> dict:
        self.turns += 1
        done = self.turns == self.last
        seen = [] if done else [{"role": "user", "content": "x" * 4 * self.turns}]
        return {"observations": seen, "reward": 0.5, "done": done, "metadata": {}}

    def get_metrics(self) -> dict:
        return {"turns": self.turns}

    def close(self) -> None:
        return None


def generate(
    *, step_wise: bool, routes: bool = False, limit: int = LIMIT
) -> tuple[dict, list[int]]:
    """Return the generator's output and the lengths of the prompts that the engine got.

    The tokenizer makes one token of a character. With routes, a token's expert is the number of the
    call that returned it.
    """
    lengths: list[int] = []

    async def answer(engine_input: Any, model: Any = None) -> dict:
        lengths.append(len(engine_input["prompt_token_ids"][0]))
        ids = [*RESPONSE, EOS] if step_wise else list(RESPONSE)
        output = {"responses": ["step"], "stop_reasons": ["stop"], "response_logprobs": None,
                  "response_ids": [ids]}  # fmt: skip
        if routes:
            experts = np.full((lengths[-1] + len(ids), 1, 1), len(lengths), dtype=np.uint8)
            output["rollout_expert_indices"] = [experts]
        return output

    def template(messages: Any, **kwargs: Any) -> Any:
        text = "".join(message.get("content", "") for message in messages)
        return [200] * max(2, len(text)) if kwargs.get("tokenize", True) else text

    tokenizer = MagicMock(eos_token_id=EOS, eos_token="e")
    tokenizer.apply_chat_template.side_effect = template
    tokenizer.encode.side_effect = lambda text, **_: [7] * len(text)
    cfg = GeneratorConfig()
    cfg.sampling_params.max_generate_length, cfg.sampling_params.logprobs = 50, None
    cfg.max_input_length, cfg.batched, cfg.max_turns = limit, False, 10
    cfg.step_wise_trajectories = step_wise
    cfg.use_conversation_multi_turn = step_wise or routes
    cfg.inference_engine.enable_return_routed_experts = routes
    cfg.chat_template = ChatTemplateConfig(source="name", name_or_path=None)
    engine = MagicMock(generate=AsyncMock(side_effect=answer), finish_session=AsyncMock())
    with patch("skyrl_gym.make", side_effect=lambda *_, **__: Env(4 if step_wise else 2)):
        generator = SkyRLGymGenerator(
            generator_cfg=cfg, skyrl_gym_cfg=MagicMock(max_env_workers=0),
            inference_engine_client=engine, tokenizer=tokenizer,
        )  # fmt: skip
        generator.base_conversation_token_ids = []
        prompts = {
            "prompts": [[{"role": "user", "content": "Q1?"}]],
            "env_extras": [{}],
            "env_classes": ["gsm8k"],
            "trajectory_ids": [TrajectoryID("a", 0)],
        }
        return asyncio.run(generator.generate(prompts)), lengths


@pytest.mark.parametrize("limit", [LIMIT, 1])
def test_length_check(limit: int) -> None:
    output, lengths = generate(step_wise=True, limit=limit)
    assert all(length <= limit for length in lengths)
    assert output["stop_reasons"][-1] == "length"
    assert len(output["response_ids"]) == max(1, len(lengths)) < 4
    trained = [any(mask) for mask in output["loss_masks"]]
    assert trained == ([True] * len(lengths) or [False])


def test_gen_only_rows() -> None:
    output, lengths = generate(step_wise=True, limit=1000)
    assert output["response_ids"] == [[*RESPONSE, EOS]] * 4
    assert output["loss_masks"] == [[1] * 4] * 4
    assert output["rewards"] == [[0.0, 0.0, 0.0, 0.5]] * 4
    assert list(map(len, output["prompt_token_ids"])) == lengths


def test_appended_eos() -> None:
    output, _ = generate(step_wise=False)
    assert output["response_ids"][0][-1] == EOS
    assert output["loss_masks"][0][-1] == 0


def test_routes_append() -> None:
    output, lengths = generate(step_wise=False, routes=True, limit=1000)
    first = lengths[0] + len(RESPONSE)  # tokens of the first turn
    routes = np.asarray(output["rollout_expert_indices"][0])[:, 0, 0].tolist()
    assert routes == [1] * first + [2] * (lengths[1] + len(RESPONSE) - first)


def output_of(groups: dict[str, list[list[float]]]) -> tuple[dict[str, Any], list[str]]:
    """Return a step-wise output and its uids; per group a list of trajectories' step rewards."""
    rows = [
        (uid, sample, reward, step + 1 == len(rewards))
        for uid, trajectories in groups.items()
        for sample, rewards in enumerate(trajectories)
        for step, reward in enumerate(rewards)
    ]
    output = {
        "prompt_token_ids": [[1]] * len(rows),
        "response_ids": [[2]] * len(rows),
        "loss_masks": [[1]] * len(rows),
        "rewards": [[reward] for _, _, reward, _ in rows],
        "rollout_logprobs": None,
        "stop_reasons": ["stop"] * len(rows),
        "trajectory_ids": [TrajectoryID(uid, sample) for uid, sample, _, _ in rows],
        "is_last_step": [last for _, _, _, last in rows],
        "rollout_metrics": {},
    }
    return output, [uid for uid, _, _, _ in rows]


EQUAL, DIFFERENT = [[0.0, 1.0], [0.0, 1.0]], [[0.0, 1.0], [0.0]]  # outcomes


def test_merge_all_fields() -> None:
    output, _ = output_of({"a": [[0.0, 1.0]]})
    output["prompt_token_ids"] = [[1], [1, 2, 3]]
    output["rollout_expert_indices"] = [np.zeros((2, 1, 1), np.uint8), np.ones((4, 1, 1), np.uint8)]
    output["trajectory_time_splits"] = {"llm": [3.0, 3.0], "env": [1.0, 1.0]}
    output["trajectory_generation_times"] = [5.0, 5.0]
    output["env_metrics"] = [{}, {"turns": 2}]
    merged = merge_stepwise_output(output)
    assert merged["response_ids"] == [[2, 3, 2]]
    assert merged["rollout_expert_indices"][0][:, 0, 0].tolist() == [0, 0, 1, 1]
    assert merged["trajectory_time_splits"] == {"llm": [3.0], "env": [1.0]}
    assert merged["trajectory_generation_times"] == [5.0]
    assert merged["env_metrics"] == [{"turns": 2}]


def test_validation() -> None:
    output, _ = output_of({"a": EQUAL, "b": DIFFERENT})
    output["is_last_step"] = [np.bool_(flag) for flag in output["is_last_step"]]
    validate_generator_output(4, output, step_wise=True)
    apart, _ = output_of({"a": [[1.0]], "b": [[1.0]]})
    again, _ = output_of({"a": [[1.0], [1.0]]})
    output = {key: value and value + again[key][1:] for key, value in apart.items()}
    with pytest.raises(AssertionError, match="Non-contiguous group at index 2"):
        validate_generator_output(3, output, step_wise=True)


def test_trajectory_metrics() -> None:
    output, _ = output_of({"a": [[0.0, 0.0, 1.0], [1.0]]})
    metrics = concatenate_generator_outputs([output], step_wise=True)["rollout_metrics"]
    assert metrics["generate/avg_num_tokens"] == 2.0  # of trajectories with 3 and 1 tokens
    assert metrics["generate/max_assistant_tokens"] == 3
    assert metrics["generate/tokens_per_turn_max"] == 1
    assert metrics["generate/avg_tokens_zero_rewards"] == 0.0


def test_dynamic_sampling_filter() -> None:
    output, uids = output_of({"a": EQUAL, "b": DIFFERENT, "c": DIFFERENT, "d": DIFFERENT})
    config = {"train_batch_size": 2, "n_samples_per_prompt": 2}
    kept, kept_uids, keep_sampling, _ = handle_filter_sampling(output, uids, config, {})
    assert kept_uids == ["b"] * 3 + ["c"] * 3 and not keep_sampling
    assert len(kept["response_ids"]) == 6


def test_dynamic_sampling_replace() -> None:
    output, uids = output_of({"a": EQUAL, "b": DIFFERENT, "c": DIFFERENT})
    config = {"min_replace_ratio": 0.3, "n_samples_per_prompt": 2}
    result, new_uids, keep_sampling = handle_replace_sampling(output, uids, config)
    assert new_uids == ["a"] * 3 + ["b"] * 3 + ["c"] * 3 and not keep_sampling
    assert [tid.instance_id for tid in result["trajectory_ids"]] == new_uids
    assert result["rewards"] == [[0.0], [1.0], [0.0]] * 3
    validate_generator_output(6, result, step_wise=True)


def test_advantage_normalization() -> None:
    algorithm = SimpleNamespace(
        advantage_batch_normalize=True, loss_reduction="sequence_mean", max_seq_len=2
    )
    settings = SimpleNamespace(algorithm=algorithm, micro_train_batch_size_per_gpu=1)
    trainer = SimpleNamespace(cfg=SimpleNamespace(trainer=settings))
    batch = TrainingInputBatch({
        "advantages": torch.tensor([[0.0, 1.0], [3.0, 3.0], [9.0, 9.0]]),
        "response_mask": torch.tensor([[0, 1], [1, 1], [1, 1]]),
        "loss_mask": torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]]),
    })  # fmt: skip
    batch.metadata = {"pad_size": 1}
    with patch(
        "skyrl.train.trainer.apply_loss_reduction_to_advantages_minibatch",
        side_effect=lambda advantages, **_: advantages,
    ):
        done = RayPPOTrainer._normalize_advantages(trainer, batch, [(0, 3)])["advantages"]
    real = torch.tensor([1.0, 3.0, 3.0])  # without the padded position and the padding row
    want = (real - real.mean()) / real.std(unbiased=False)
    torch.testing.assert_close(torch.cat([done[0, 1:], done[1]]), want)


def test_float32_logprobs() -> None:
    logits, labels = torch.randn(1, 3, 50).bfloat16(), torch.tensor([[1, 2, 3]])
    logprobs = logprobs_from_logits_v2(logits, labels)
    want = logits.float().log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, want)

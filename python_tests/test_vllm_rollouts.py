"""What a run asks of vLLM besides trajectories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from skyrl_fast.config.loading import load_config
from skyrl_fast.rollout.engine_pool import EnginePool
from skyrl_fast.rollout.env import EnvConfig, EnvFactory
from skyrl_fast.train.vllm_rollouts import VllmRollouts


class NoEngine:
    """An engine that nobody starts."""

    name = "none"


def test_the_probe_is_made_once_and_fits_the_engine(tmp_path: Path, tiny_tokenizer: Any) -> None:
    data = tmp_path / "train.jsonl"
    rows = [{"prompt": "a prompt that is longer than what the engine takes"}, {"prompt": "b" * 9}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load_config(
        None,
        [
            f"data.train_data=[{data}]",
            "trainer.policy.model.path=m",
            "trainer.max_prompt_length=8",
            "generator.sampling_params.max_generate_length=4",
        ],
    )
    pool = EnginePool([NoEngine()])  # type: ignore[list-item]
    rollouts = VllmRollouts(config, tiny_tokenizer, pool, EnvFactory(EnvConfig()))
    probe = rollouts._probe
    assert [len(ids) for ids in probe] == [11, 9]  # with the token behind it 12, the engine's most
    assert tiny_tokenizer.decode(probe[0]) == "a prompt th"
    data.unlink()  # an update long after the start reads nothing
    assert rollouts._probe is probe

"""A model whose generation config has several end tokens, on real vLLM."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from _families import family

from skyrl_fast.trajectory_store import read_trajectories

SCRIPT = """
import sys
import skyrl_fast
from skyrl_fast.train import Env, EnvStep

class Two(Env):
    def __init__(self, row):
        self.turn = 0

    def step(self, action):
        assert "<end_of_turn>" not in action
        self.turn += 1
        done = self.turn == 2
        return EnvStep(len(action) / 400 if done else 0.0, done=done, observations="more")

if __name__ == "__main__":
    folder = sys.argv[1]
    skyrl_fast.train_agent(
        {
            "trainer.policy.model.path": f"{folder}/model",
            "trainer.run_path": f"{folder}/run",
            "trainer.max_training_steps": 2,
            "trainer.train_batch_size": 4,
            "trainer.policy_mini_batch_size": 4,
            "trainer.policy.optimizer_config.lr": 0.01,
            "trainer.eval_before_train": False,
            "trainer.eval_interval": -1,
            "trainer.plot": False,
            "generator.n_samples_per_prompt": 8,
            "generator.max_turns": 2,
            "generator.max_input_length": 1024,
            "generator.sampling_params.max_generate_length": 400,
            "generator.inference_engine.model_dtype": "float32",
            "generator.skip_special_tokens": False,
        },
        env=Two,
        prompts=[{"prompt": f"task {n}"} for n in range(8)],
    )
"""


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.spec("rollout.end-tokens")
def test_second_prompts_have_the_sampled_end_once(tmp_path: Path) -> None:
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    tokenizer = family("gemma3")
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<end_of_turn>")]
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 2048},
        tie_word_embeddings=False,
        eos_token_id=ends[0],
    )
    model = Qwen2ForCausalLM(config).float()
    model.generation_config = GenerationConfig(eos_token_id=ends)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "run.py").write_text(SCRIPT)
    subprocess.run([sys.executable, str(tmp_path / "run.py"), str(tmp_path)], check=True)

    found = {end: 0 for end in ends}
    for trajectory in read_trajectories(tmp_path / "run", phase="train"):
        first, second = trajectory.steps
        start = [*first.prompt_token_ids, *first.response_ids]
        assert list(second.prompt_token_ids)[: len(start)] == start
        after = list(second.prompt_token_ids)[len(start) :]
        if first.response_ids[-1] in ends:
            found[first.response_ids[-1]] += 1
            assert tokenizer.decode(after).startswith("\n<start_of_turn>user\nmore<end_of_turn>")
        else:  # cut by its length
            assert after[0] == ends[1]
    assert found[ends[1]] > 3 and found[ends[0]] > 3
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if row.get("step")]
    name = "policy/rollout_train_logprobs_abs_diff_max"
    assert len(steps) == 2 and all(row[name] < 1e-5 for row in steps)

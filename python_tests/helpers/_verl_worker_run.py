"""verl's TrainingWorker in a Ray actor on a CPU: log-probabilities, then two updates.

python _verl_worker_run.py stock|installed OUT.json: writes losses, gradient norms and calls.
"""

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch

ROWS, PROMPT, RESPONSE, VOCAB, UPDATES = 8, 12, 20, 128, 2


def environment(how: str) -> dict[str, str]:
    """Return the actor's environment: verl's own doors only."""
    ours = ",skyrl_fast.integrations.verl" if how == "installed" else ""
    return {
        "VERL_USE_EXTERNAL_MODULES": f"verl_cpu{ours}",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # verl registers its FSDP engine for accelerators only
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]]),
        "OMP_NUM_THREADS": "1",
        **{"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
    }


def save_model(folder: str) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCAB, **sizes, **heads)).save_pretrained(folder)


def batch() -> Any:
    """Return a batch in verl's layout: prompts padded on the left, responses on the right."""
    from tensordict import TensorDict

    g = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, 100, (ROWS, PROMPT), generator=g)
    responses = torch.randint(3, 100, (ROWS, RESPONSE), generator=g)
    prompt_sizes = torch.randint(3, PROMPT + 1, (ROWS, 1), generator=g)
    sizes = torch.randint(4, RESPONSE + 1, (ROWS, 1), generator=g)
    response_mask = (torch.arange(RESPONSE) < sizes).long()
    mask = torch.cat([(torch.arange(PROMPT) >= PROMPT - prompt_sizes).long(), response_mask], 1)
    return TensorDict(
        {
            "input_ids": torch.cat([prompts, responses], 1) * mask,
            "prompts": prompts,
            "responses": responses,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "response_mask": response_mask,
            "advantages": torch.randn(ROWS, RESPONSE, generator=g) * response_mask,
        },
        batch_size=ROWS,
    )


def training_worker(model: str) -> Any:
    """Return verl's worker with its FSDP2 engine in float32 and its PPO loss."""
    import verl.models.transformers.monkey_patch as patches
    from verl.trainer.config import CheckpointConfig
    from verl.workers import config as kinds
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss

    patches.is_trl_available = lambda: False  # verl 0.9.1 imports a class that TRL 1.16 dropped
    types = {f"{name}_dtype": "fp32" for name in ("param", "reduce", "buffer")}
    engine = kinds.FSDPEngineConfig(
        strategy="fsdp2", use_dynamic_bsz=False, use_torch_compile=False, model_dtype="fp32",
        dtype="float32", mixed_precision=types, micro_batch_size_per_gpu=4,
        infer_micro_batch_size_per_gpu=4,
    )  # fmt: skip
    attention = {"attn_implementation": "sdpa"}
    worker = TrainingWorker(
        kinds.TrainingWorkerConfig(
            model_type="language_model",
            model_config=kinds.HFModelConfig(
                path=model, enable_gradient_checkpointing=False, override_config=attention
            ),
            engine_config=engine,
            optimizer_config=kinds.FSDPOptimizerConfig(lr=1e-3, total_training_steps=4),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    actor = kinds.FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_mini_batch_size=ROWS, ppo_micro_batch_size_per_gpu=4,
        use_dynamic_bsz=False,
    )  # fmt: skip
    worker.set_loss_fn(partial(ppo_loss, config=actor))
    return worker


@ray.remote
class Actor:
    def run(self, model: str) -> dict[str, Any]:
        import verl  # noqa: F401  (loads the external modules)
        from verl.utils import tensordict_utils as tu
        from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

        worker, data = training_worker(model), batch()
        tokens = data["attention_mask"].sum(1).tolist()
        data = left_right_2_no_padding(data)
        sizes = {"global_batch_size": ROWS, "mini_batch_size": ROWS, "global_token_num": tokens}
        tu.assign_non_tensor(data, compute_loss=False, temperature=1.0, **sizes)
        logprobs = no_padding_2_padding(worker.infer_batch(data.copy())["log_probs"], data)
        data["old_log_probs"] = logprobs
        tu.assign_non_tensor(data, compute_loss=True)
        metrics = [tu.get(worker.train_batch(data.copy()), "metrics") for _ in range(UPDATES)]
        return {
            "logprobs": logprobs.flatten().tolist(),
            "updates": [[float(m["loss"]), float(m["grad_norm"])] for m in metrics],
            "calls": self.calls(),
        }

    def calls(self) -> dict[str, tuple[int, int]]:
        """Return calls and those that verl's own functions answered, by function."""
        module = sys.modules.get("skyrl_fast.integrations.verl")
        rows = () if module is None else module.report().rows
        return {
            row.name: (row.counts.calls, row.counts.handed_back) for row in rows if row.counts.calls
        }


def main() -> None:
    how, out = sys.argv[1:]
    ray.init(num_cpus=2, runtime_env={"env_vars": environment(how)})
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        result = ray.get(Actor.remote().run.remote(folder))
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()

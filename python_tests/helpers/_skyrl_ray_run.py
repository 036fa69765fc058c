"""One training step of SkyRL's trainer on a local Ray, with synthetic rollouts and workers.

python _skyrl_ray_run.py stock|installed OUT.json: writes what the step gave and who computed it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

PROMPTS, SAMPLES, RANKS, VOCAB = 4, 3, 2, 50


def synthetic_rollouts() -> dict[str, Any]:
    """Trajectories of 1 to 4 turns with a growing context, in SkyRL's lists."""
    from skyrl.train.generators.base import TrajectoryID

    rng = np.random.default_rng(0)
    fields = ("prompt_token_ids", "response_ids", "loss_masks", "rewards", "rollout_logprobs")
    output: dict[str, Any] = {field: [] for field in (*fields, "trajectory_ids", "is_last_step")}
    for prompt in range(PROMPTS):
        for sample in range(SAMPLES):
            context = rng.integers(1, VOCAB, 5).tolist()
            turns = int(rng.integers(1, 5))
            for turn in range(turns):
                response = rng.integers(1, VOCAB, int(rng.integers(2, 7))).tolist()
                output["prompt_token_ids"].append(list(context))
                output["response_ids"].append(response)
                output["loss_masks"].append([1] * len(response))
                reward = float(rng.integers(0, 2)) if turn + 1 == turns else 0.0
                output["rewards"].append([0.0] * (len(response) - 1) + [reward])
                output["rollout_logprobs"].append((-rng.random(len(response))).tolist())
                output["trajectory_ids"].append(TrajectoryID(f"p{prompt}", sample))
                output["is_last_step"].append(turn + 1 == turns)
                context += response + rng.integers(1, VOCAB, 3).tolist()
    size = len(output["response_ids"])
    return {**output, "stop_reasons": ["stop"] * size, "rollout_metrics": {"env/mean_x": 1.0}}


class Generator:
    """Returns the synthetic rollouts for any input."""

    async def generate(self, input_batch: Any) -> dict[str, Any]:
        return synthetic_rollouts()


def worker_class() -> Any:
    """Return the Ray actor: a model of one matrix, with SkyRL's loss and log-probabilities."""
    import ray
    import torch

    @ray.remote(num_cpus=0.5)
    class Worker:
        def __init__(self) -> None:
            from skyrl.backends.skyrl_train.utils import ppo_utils, torch_utils

            torch.manual_seed(0)
            self.table = torch.randn(VOCAB, VOCAB).requires_grad_()
            self.ppo_utils, self.torch_utils = ppo_utils, torch_utils

        def logprobs(self, chunk: Any) -> Any:
            width = chunk.metadata["response_length"]
            tokens = chunk["sequences"]
            logits = self.table[tokens[:, -width - 1 : -1]]
            return self.torch_utils.logprobs_from_logits(logits, tokens[:, -width:])

        def forward(self, chunk: Any) -> list[list[float]]:
            with torch.no_grad():
                return self.logprobs(chunk).tolist()

        def forward_backward(self, chunk: Any) -> dict[str, float]:
            from skyrl.train.config import AlgorithmConfig

            loss_fn = self.ppo_utils.PolicyLossRegistry.get("regular")
            config = AlgorithmConfig(policy_loss_type="regular")
            self.table.grad = None
            loss, metrics = loss_fn(
                self.logprobs(chunk), chunk["action_log_probs"] - 0.1, chunk["advantages"], config,
                chunk["loss_mask"], None,
            )  # fmt: skip
            loss.backward()
            grad = self.table.grad
            return {"loss": loss.item(), "grad": float(grad.norm()), **metrics}

        def installed(self) -> dict[str, list[int]]:
            from skyrl_fast.integrations.skyrl import report

            return {row.name: [row.calls, row.handed_back] for row in report().rows}

    return Worker


class Dispatch:
    """SkyRL's staging of chunks in Ray's object store, to this file's workers."""

    def __init__(self) -> None:
        from skyrl.backends.skyrl_train.distributed.dispatch import MeshDispatch

        worker = worker_class()
        self.mesh = MeshDispatch
        self.infos = [
            SimpleNamespace(handle=worker.remote(), rank=SimpleNamespace(dp=rank, dp_size=RANKS))
            for rank in range(RANKS)
        ]
        self.statuses: list[dict[str, float]] = []

    def get_lcm_dp_size(self) -> int:
        return RANKS

    def forward(self, model: str, data: Any) -> Any:
        import ray

        rows = ray.get(self.infos[0].handle.forward.remote(data))
        return SimpleNamespace(loss_fn_outputs=[{"logprobs": row} for row in rows])

    def forward_from_staged(self, model: str, chunk_refs: Any) -> Any:
        import ray

        refs = self.mesh.dispatch_from_staged(self.infos, "forward", chunk_refs=chunk_refs)
        rows = [row for part in ray.get(refs) for row in part]
        return SimpleNamespace(loss_fn_outputs=[{"logprobs": row} for row in rows])

    def stage_data(self, model: str, data: Any, boundaries: Any) -> Any:
        return self.mesh.stage_chunks(RANKS, data, boundaries)

    def forward_backward_from_staged(self, model: str, chunk_refs: Any) -> Any:
        import ray

        refs = self.mesh.dispatch_from_staged(self.infos, "forward_backward", chunk_refs=chunk_refs)
        statuses = ray.get(refs)
        self.statuses += statuses
        return SimpleNamespace(metrics={"policy_loss": sum(s["loss"] for s in statuses)})

    def optim_step(self, model: str) -> None:
        return None

    def empty_cache(self, model: str | None = None) -> None:
        return None


def run(installed: bool, merge: bool) -> dict[str, Any]:
    """Take the step; return the tensors as lists, metrics, and the workers' reports."""
    import ray
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.trainer import RayPPOTrainer

    cfg = SkyRLTrainConfig()
    cfg.trainer.train_batch_size = PROMPTS
    cfg.trainer.policy_mini_batch_size = 2
    cfg.trainer.algorithm.advantage_estimator = "grpo"
    cfg.trainer.algorithm.max_seq_len = 1000
    cfg.trainer.critic.model.path = None
    cfg.trainer.recompute_old_logprobs_per_minibatch = False  # padding rows have no mini-batch
    cfg.generator.n_samples_per_prompt = SAMPLES
    cfg.generator.step_wise_trajectories = True
    cfg.generator.merge_stepwise_output = merge
    trainer = RayPPOTrainer(
        cfg=cfg,
        tracker=None,
        tokenizer=SimpleNamespace(pad_token_id=0),
        train_dataset=None,
        inference_engine_client=None,
        generator=Generator(),
    )
    trainer.dispatch = Dispatch()
    prompts = {"prompts": [None] * (PROMPTS * SAMPLES)}
    output = asyncio.run(trainer.generate(prompts))
    uids = [tid.instance_id for tid in output["trajectory_ids"]]
    output, uids = trainer.postprocess_generator_output(output, uids)
    batch = trainer.convert_to_training_input(output, uids)
    batch = trainer.fwd_logprobs_values_reward(batch)
    batch = trainer.compute_advantages_and_returns(batch)
    status = trainer.train_critic_and_policy(batch)
    workers = []
    if installed:
        workers = ray.get([info.handle.installed.remote() for info in trainer.dispatch.infos])
    return {
        "tensors": {k: v.tolist() for k, v in batch.items() if hasattr(v, "tolist")},
        "metrics": {k: float(v) for k, v in trainer.all_metrics.items()},
        "status": {k: float(v) for k, v in status.items()},
        "statuses": trainer.dispatch.statuses,
        "metadata": {k: batch.metadata[k] for k in ("pad_size", "policy_mini_batch_boundaries")},
        "workers": workers,
    }


def main() -> None:
    """Run with or without the replacements, with and without merging, and write both results."""
    installed = sys.argv[1] == "installed"
    if installed:
        import skyrl_fast.integrations.skyrl as fast

        fast.install()
    import ray

    ray.init(num_cpus=2, include_dashboard=False)
    from skyrl.backends.skyrl_train.utils.ppo_utils import sync_registries

    sync_registries()  # as SkyRL's entry point does
    results: dict[str, Any] = {"steps": [run(installed, merge) for merge in (False, True)]}
    if installed:
        results["driver"] = {r.name: [r.state, r.calls, r.handed_back] for r in fast.report().rows}
    ray.shutdown()
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()

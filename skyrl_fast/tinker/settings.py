"""Which of the trainer's settings apply to a server of the Tinker SDK, and why the others do not.

The table of features says which settings of a run go together. A server has no run: what would be
settings comes with the calls of its programs, so it has a table of its own.
"""

from __future__ import annotations

from skyrl_fast.config import Config
from skyrl_fast.config.listing import shown
from skyrl_fast.config.settings import leaves

_LORA = "trainer.policy.model.lora"
_ENGINE = "generator.inference_engine"

APPLIED = frozenset(
    [
        f"{_LORA}.alpha",
        f"{_LORA}.exclude_modules",
        f"{_LORA}.init_method",
        f"{_LORA}.use_rslora",
        "trainer.policy.dtype",
        "trainer.policy.lm_head_dtype",
        "trainer.seed",
        "trainer.max_tokens_per_microbatch",
        "trainer.row_layout",
        "trainer.gradient_checkpointing",
        "trainer.residual_dtype",
        "trainer.device",
        "trainer.num_threads",
        "trainer.dump_trajectories",
        f"{_ENGINE}.tensor_parallel_size",
        f"{_ENGINE}.model_dtype",
        f"{_ENGINE}.enable_prefix_caching",
        f"{_ENGINE}.enforce_eager",
        f"{_ENGINE}.gpu_ids",
        f"{_ENGINE}.max_num_seqs",
        f"{_ENGINE}.max_num_batched_tokens",
        f"{_ENGINE}.gpu_memory_utilization",
        f"{_ENGINE}.num_threads",
        f"{_ENGINE}.engine_init_kwargs",
    ]
)

_NO_RUN = "there is no run, whose loop is the program's own"
_ONE_ENGINE = "the server starts one engine, which loads adapters with the requests that name them"
# Of each section or setting that does not apply, why; the longest name that fits counts.
WITHOUT_MEANING = {
    "data": "programs bring their own prompts",
    "environment": "programs bring their own environments",
    "agent": "programs bring their own agents",
    "generator": "programs say how they sample with each call",
    _ENGINE: _ONE_ENGINE,
    "trainer": _NO_RUN,
    "trainer.algorithm": "programs name loss, thresholds and advantages with each call",
    "trainer.critic": "adapters of policies are trained alone",
    "trainer.ref": "a program samples from the base model, or from a snapshot, as its reference",
    "trainer.fully_async": "programs say themselves when they sample and train",
    "trainer.placement": "one process trains all adapters",
    "trainer.policy": "one process trains all adapters of one model",
    "trainer.policy.model.path": "the command's MODEL is it",
    "trainer.policy.optimizer_config": "programs give AdamW's numbers with each optim_step",
    _LORA: "programs create their adapters and say where each starts",
    f"{_LORA}.rank": "each program chooses its own, up to --max-rank",
    f"{_LORA}.target_modules": "each program chooses by train_attn and train_mlp",
}


def reason_without(name: str) -> str | None:
    """Return why a setting has no meaning for a server; None if it applies.

    Example:
        >>> reason_without("data.train_data")
        'programs bring their own prompts'
    """
    if name in APPLIED:
        return None
    parts = name.split(".")
    sections = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next(WITHOUT_MEANING[one] for one in sections if one in WITHOUT_MEANING)


def check_settings(config: Config, defaults: Config) -> None:
    """Raise ValueError for a setting that differs from the server's default and does not apply."""
    expected = {name: value for name, value, _ in leaves(defaults)}
    for name, value, _ in leaves(config):
        if name in expected and value == expected[name]:
            continue
        reason = reason_without(name)
        if reason is not None:
            raise ValueError(
                f"{name}: has no meaning for skyrl-fast tinker, as {reason}; got {shown(value)}"
            )

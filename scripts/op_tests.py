"""The tests of the ops, by name, for wheels and sanitizer builds."""

_OPS = (
    "advantage",
    "batch_tensors",
    "cell_rows",
    "linear_logprob",
    "logprob",
    "masked_logprob_loss",
    "merge",
    "merge_invariants",
    "off_policy",
    "pack",
    "policy_loss",
    "prefix_tree",
    "threads",
    "token_advantage",
    "tree_attention",
    "turn_advantage",
)
OP_TESTS = tuple(f"python_tests/ops/test_{name}.py" for name in _OPS)
EMULATED_TESTS = tuple(
    f"python_tests/gpu/test_{name}_cuda.py"
    for name in ("advantage", "logprob", "pack", "policy_loss")
)
# Further files with tests for a GPU.
OTHER_GPU_TESTS = tuple(
    f"python_tests/{name}.py"
    for name in (
        "ops/test_masked_logprob_loss",
        "ops/test_ratio_precision",
        "ops/test_streams",
        "ops/test_tree_attention",
        "train/test_tree_training",
        "train/test_sequence_ranks",
        "train/test_ranks",
        "integrations/test_skyrl_losses",
    )
)

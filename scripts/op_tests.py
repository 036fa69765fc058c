"""The tests of the ops, by name: what a wheel and a sanitizer's build are put under."""

OP_TESTS = (
    "advantage",
    "batch_tensors",
    "cell_rows",
    "credit_tokens",
    "credit_turns",
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
)
EMULATED_TESTS = ("advantage_cuda", "logprob_cuda", "pack_cuda", "policy_loss_cuda")

"""One launch of each kernel at a published size, for NVIDIA's profiler.

ncu python -m bench.gpu.profile [--vocab 151936]
"""

from __future__ import annotations

import argparse

import torch

from skyrl_fast import masked_logprob_loss, policy_loss, selected_logprob
from skyrl_fast.ops import _backend

NUM_TOKENS = 8192
BATCH = (17_006, 500)  # rows and tokens of policy_loss


def main() -> None:
    """Launch the log-probability, its backward pass, the masked loss and the policy loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for a smoke test")
    options = parser.parse_args()
    device = options.device
    num_tokens, vocab, shape = (
        (6, 64, (5, 7)) if options.tiny else (NUM_TOKENS, options.vocab, BATCH)
    )
    # The launches that compare a kernel at its first use would be profiled in place of these.
    with _backend.trust_kernels():
        run_kernels(num_tokens, vocab, shape, device)
    print(f"profile: the kernels ran at V = {vocab}")


def run_kernels(num_tokens: int, vocab: int, shape: tuple[int, int], device: str) -> None:
    """Launch each kernel; backward passes in this thread's own order."""
    logits = torch.randn(num_tokens, vocab, device=device, dtype=torch.bfloat16)
    targets = torch.randint(0, vocab, (num_tokens,), device=device)
    ones = torch.ones(num_tokens, device=device)
    with torch.no_grad():
        selected_logprob(logits, targets)
        selected_logprob(logits, targets, return_entropy=True)
    leaf = logits.clone().requires_grad_()
    selected_logprob(leaf, targets, inplace_backward=True).sum().backward()
    leaf = logits.clone().requires_grad_()
    masked_logprob_loss(leaf, targets, -12.0 * ones, ones, inplace_backward=True).loss.backward()
    logprobs = (-torch.rand(shape, device=device)).requires_grad_()
    old, ones = logprobs.detach() - 0.01, torch.ones(shape, device=device)
    policy_loss(logprobs, old, ones, ones)[0].backward()
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()

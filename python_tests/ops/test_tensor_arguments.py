"""What every op does with tensors on other devices, with the negative bit, and of torch.func."""

from collections.abc import Callable

import pytest
import torch

import skyrl_fast as sf
from skyrl_fast.ops import _backend
from skyrl_fast.ops.passes.plan import PassPlan

LOGITS = torch.tensor([[0.0, 1.0, -2.0], [3.0, 0.5, 0.0]])
TARGETS = torch.tensor([1, 2])
ONES = torch.ones(2)
META = torch.ones(2, device="meta")


def masked_loss(**arguments: torch.Tensor) -> object:
    arguments = {"old_logprobs": ONES, "advantages": ONES} | arguments
    kl = "k1" if "ref_logprobs" in arguments else None
    return sf.masked_logprob_loss(LOGITS, TARGETS, **arguments, kl_estimator=kl)


def head(mask: torch.Tensor | None = None, targets: torch.Tensor = TARGETS) -> object:
    return sf.linear_logprob(LOGITS, torch.ones(4, 3), targets, loss_mask=mask)


ELSEWHERE: dict[str, Callable[[], object]] = {
    "selected_logprob mask": lambda: sf.selected_logprob(LOGITS, TARGETS, loss_mask=META),
    "linear_logprob mask": lambda: head(mask=META),
    "linear_logprob targets": lambda: head(targets=TARGETS.to("meta")),
    **{
        f"masked_logprob_loss {name}": lambda name=name: masked_loss(**{name: META})
        for name in ("old_logprobs", "advantages", "loss_mask", "ref_logprobs", "row_weights",
                     "token_weights")
    },
    "kl_penalty reference": lambda: sf.kl_penalty(ONES, META),
    "kl_penalty mask": lambda: sf.kl_penalty(ONES, ONES, loss_mask=META),
    "group_advantage mask": lambda: sf.group_advantage(ONES, [0, 0], response_mask=META),
    "turn_level_returns mask": lambda: sf.turn_level_returns(ONES, response_mask=META),
    "gae mask": lambda: sf.gae(ONES, ONES, loss_mask=META),
    "gae values": lambda: sf.gae(ONES, META),
    "reduction_weights offsets": lambda: sf.reduction_weights(
        ONES, reduction="token_mean", cu_seqlens=META.long()
    ),
}  # fmt: skip


@pytest.mark.spec("tensors.one-device")
@pytest.mark.parametrize("case", ELSEWHERE)
def test_tensors_on_another_device_are_refused(case: str) -> None:
    op = case.split()[0]
    with pytest.raises(ValueError, match=rf"{op}: .*expected .*meta"):
        ELSEWHERE[case]()


def negative(values: torch.Tensor) -> torch.Tensor:
    """Return `values` in memory that holds -values."""
    view = torch._neg_view(-values)
    assert view.is_neg()
    assert view.is_contiguous()
    return view


REFUSED: dict[str, Callable[[], object]] = {
    "group_advantage": lambda: sf.group_advantage(negative(ONES), [0, 0]),
    "group_advantage mask": lambda: sf.group_advantage(ONES, [0, 0], response_mask=negative(ONES)),
    "gae": lambda: sf.gae(negative(ONES), ONES),
    "pack_steps rows": lambda: sf.pack_steps({"x": [ONES, negative(ONES)]}),
    "pack_steps flat": lambda: sf.pack_steps({"x": (negative(ONES), torch.tensor([0, 2]))}),
    "padded_to_varlen": lambda: sf.padded_to_varlen(negative(LOGITS), lengths=[3, 2]),
    "varlen_to_padded": lambda: sf.varlen_to_padded(negative(ONES), torch.tensor([0, 2])),
    "off_policy_correction": lambda: sf.off_policy_correction(
        negative(LOGITS), LOGITS, LOGITS, tis_ratio_type="token"
    ),
    "masked_logprob_loss": lambda: sf.masked_logprob_loss(
        negative(LOGITS).requires_grad_(), TARGETS, None, ONES, inplace_backward=True
    ),
}  # fmt: skip


@pytest.mark.spec("tensors.negative-bit")
@pytest.mark.parametrize("case", REFUSED)
def test_tensors_with_the_negative_bit_are_refused(case: str) -> None:
    op = case.split()[0]
    with pytest.raises(ValueError, match=rf"{op}: .* without the negative bit.*resolve_neg"):
        REFUSED[case]()


def test_triton_kernels_refuse_the_negative_bit() -> None:
    with pytest.raises(ValueError, match="op: tensors must not have the negative bit"):
        _backend.run_kernel("op", True, ONES, negative(ONES), None)


@pytest.mark.spec("tensors.negative-bit")
def test_tensors_with_the_negative_bit_that_are_read_as_their_values() -> None:
    got = sf.selected_logprob(negative(LOGITS), TARGETS)
    assert got.tolist() == sf.selected_logprob(LOGITS, TARGETS).tolist()
    got = sf.kl_penalty(negative(ONES), 3 * ONES)
    assert got.tolist() == sf.kl_penalty(ONES, 3 * ONES).tolist()
    batch = {"x": negative(LOGITS), "z": torch.tensor([[1 + 2j], [3j]]).conj()}
    padded = sf.pad_batch(batch, 1)
    assert padded["x"].tolist() == [*LOGITS.tolist(), LOGITS[0].tolist()]
    assert padded["z"].tolist() == [[1 - 2j], [-3j], [1 - 2j]]


def total(op: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: op(x).sum()


OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "kl_penalty": lambda x: sf.kl_penalty(x, LOGITS),
    "policy_loss": lambda x: sf.policy_loss(x, LOGITS, LOGITS, LOGITS).loss,
    "selected_logprob": lambda x: sf.selected_logprob(x, TARGETS),
    "masked_logprob_loss": lambda x: sf.masked_logprob_loss(x, TARGETS, None, ONES).loss,
    "linear_logprob": lambda x: sf.linear_logprob(x, torch.ones(4, 3), TARGETS),
    "padded_to_varlen": lambda x: sf.padded_to_varlen(x, lengths=[3, 2]).values,
    "varlen_to_padded": lambda x: sf.varlen_to_padded(x, torch.tensor([0, 2])),
    "group_advantage": lambda x: sf.group_advantage(x, torch.tensor([0, 0])),
    "turn_level_returns": lambda x: sf.turn_level_returns(x),
    "off_policy_correction": lambda x: sf.off_policy_correction(
        x, LOGITS, LOGITS, tis_ratio_type="token"
    )[0],
}
SUMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{name: OPS[name] for name in list(OPS)[:5]},
    "selected_logprob in place": lambda x: sf.selected_logprob(
        x * 1, TARGETS, inplace_backward=True
    ),
    "masked_logprob_loss in place": lambda x: (
        sf.masked_logprob_loss(x * 1, TARGETS, None, ONES, inplace_backward=True).loss
    ),
    **{
        f"tree_attention {dtype}": lambda x, dtype=dtype: sf.tree_attention(
            *[x[None, None].to(dtype)] * 3, sf.plan_tree_attention(*TREE)
        )
        for dtype in (torch.float32, torch.bfloat16)
    },
}  # fmt: skip
TREE = torch.tensor([-1, 0], dtype=torch.int32), torch.tensor([2, 2], dtype=torch.int32)


@pytest.mark.spec("logprob.second-derivative")
@pytest.mark.parametrize("only", [True, False])
@pytest.mark.parametrize("case", SUMS)
def test_second_derivative_is_refused_where_the_first_is_a_term_of_a_sum(
    case: str, only: bool
) -> None:
    x = LOGITS.clone().requires_grad_()
    (first,) = torch.autograd.grad(SUMS[case](x).sum(), x, create_graph=True)
    value = first.square().sum() + x.sum()
    with pytest.raises(RuntimeError, match=f"{case.split()[0]}: no second derivative; use"):
        torch.autograd.grad(value, x) if only else value.backward()


WITH_VMAP = ("policy_loss", "selected_logprob", "masked_logprob_loss")


@pytest.mark.spec("tensors.transforms")
@pytest.mark.parametrize("op", OPS)
def test_gradients_of_torch_func(op: str) -> None:
    message = f"{op}: torch.func.grad is not supported"
    with pytest.raises(RuntimeError, match=message):
        torch.func.grad(total(OPS[op]))(LOGITS)
    with pytest.raises(RuntimeError, match=message):
        torch.func.vjp(OPS[op], LOGITS)


@pytest.mark.spec("tensors.transforms")
@pytest.mark.parametrize("op", OPS)
def test_vmap(op: str) -> None:
    many = torch.stack([LOGITS, LOGITS + 1])
    if op in WITH_VMAP:
        want = torch.stack([OPS[op](x) for x in many])
        torch.testing.assert_close(torch.func.vmap(OPS[op])(many), want)
        many.requires_grad_()
        with pytest.raises(RuntimeError, match=f"{op}: torch.func.grad is not supported"):
            torch.func.vmap(OPS[op])(many)
        return
    with pytest.raises(RuntimeError, match=f"{op}: torch.func.vmap is not supported"):
        torch.func.vmap(OPS[op])(many)


def test_the_torch_backend_has_the_transforms_that_errors_recommend() -> None:
    def penalty(x: torch.Tensor) -> torch.Tensor:
        return sf.kl_penalty(x, LOGITS, estimator="k2", backend="torch").sum()

    assert torch.func.grad(penalty)(LOGITS + 1).tolist() == torch.ones(2, 3).tolist()
    with pytest.raises(RuntimeError, match="use backend='torch'"):
        torch.func.grad(lambda x: sf.kl_penalty(x, LOGITS).sum())(LOGITS)


def test_tensors_that_dlpack_cannot_share_name_op_and_argument() -> None:
    with pytest.raises(RuntimeError, match="group_advantage: is_last_step: expected a tensor that"):
        sf.group_advantage(ONES, [0, 0], is_last_step=META.bool())


CELLS, MASK = torch.zeros(2, 3), torch.ones(2, 3)
OUTPUT = {
    "prompt_token_ids": [[1], [1, 2]], "response_ids": [[2], [3]], "rewards": [1.0, 0.0],
    "loss_masks": [[1], [1]], "trajectory_ids": [("a", 0), ("a", 0)], "is_last_step": [False, True],
    "rollout_expert_indices": [[[[0, 1]]], [[[1, 0]]] * 3],
}  # fmt: skip
TOKENS, OFFSETS = torch.tensor([1, 2, 1, 3]), torch.tensor([0, 2, 4])
# Ops that allocate tensors of their own, each called on the CPU.
ALLOCATING: dict[str, Callable[[str | None], object]] = {
    "group_advantage": lambda backend: sf.group_advantage(ONES, ["a", "a"], backend=backend),
    "group_advantage flags": lambda backend: sf.group_advantage(
        ONES, ["a", "a"], is_last_step=[False, True], backend=backend
    ),
    "turn_level_returns": lambda backend: sf.turn_level_returns(ONES, backend=backend),
    "gae": lambda backend: sf.gae(CELLS, CELLS, backend=backend),
    "gae offsets": lambda backend: sf.gae(ONES, ONES, cu_seqlens=[0, 2], backend=backend),
    "reinforce_plus_plus": lambda backend: sf.reinforce_plus_plus(ONES, backend=backend),
    "pack_steps": lambda backend: sf.pack_steps({"t": [[1, 2], [3]]}, backend=backend),
    "convert": lambda backend: sf.convert_prompts_responses_to_batch_tensors(
        0, [[1], [1]], [[2], [2, 3]], [1.0, 0.5], [[1], [1, 1]], backend=backend
    ),
    "batch": lambda _: sf.StepBatch.from_generator_output(OUTPUT),
    "batch rows": lambda _: BATCH.rows([1, 0]).trajectory_ids,
    "batch merged": lambda _: BATCH.merged().tokens,
    "batch padded": lambda _: BATCH.padded(0, pad_size=1).sequences,
    "concatenate": lambda _: sf.batch.concatenate([BATCH, OTHER]).tokens,
    "merge_steps": lambda backend: sf.merge_steps([[1], [1, 2, 9]], [[2], [3]], [0, 0],
                                                  backend=backend),
    "pad_batch": lambda _: sf.pad_batch({"x": CELLS}, 1),
    "padded_to_varlen": lambda backend: sf.padded_to_varlen(CELLS, MASK, backend=backend),
    "padded_to_varlen lengths": lambda backend: sf.padded_to_varlen(
        CELLS, lengths=[1, 2], backend=backend
    ),
    "varlen_to_padded": lambda backend: sf.varlen_to_padded(ONES, [0, 1, 2], backend=backend),
    "off_policy_correction": lambda backend: sf.off_policy_correction(
        CELLS, CELLS, MASK, tis_ratio_type="sequence", trajectory_ids=["b", "a"], backend=backend
    ),
    "policy_loss": lambda backend: sf.policy_loss(
        CELLS, CELLS, CELLS, MASK, loss="gspo", trajectory_ids=["b", "a"], backend=backend
    ).loss,
    "policy_loss clip_cov": lambda backend: sf.policy_loss(
        CELLS, CELLS, CELLS, MASK, loss="clip_cov", backend=backend
    ).loss,
    "reduction_weights": lambda backend: sf.reduction_weights(
        MASK, reduction="prompt_mean", group_ids=["a", "b"], backend=backend
    ),
    "build_prefix_tree": lambda backend: sf.build_prefix_tree(
        TOKENS, OFFSETS, backend=backend
    ).ends,
    "tree_attention": lambda _: sf.tree_attention(
        *[LOGITS[None, None]] * 3, sf.plan_tree_attention(*TREE)
    ),
    "PassPlan": lambda _: PassPlan(
        TOKENS.int(), OFFSETS, torch.tensor([0, 1, 2], device="cpu"), ONES == 1,
        group_ids=ONES.int(), trajectory_ids=ONES.int(), rows=ONES == 1, token_budget=9, tree=True,
    ).arrays(0, TOKENS.int())["ends"],
}  # fmt: skip
BATCH, OTHER = (
    sf.StepBatch.from_generator_output(OUTPUT | {"trajectory_ids": [(uid, 0)] * 2}) for uid in "ab"
)


@pytest.mark.parametrize("case", ALLOCATING)
def test_default_device_has_no_part_in_ops_on_the_cpu(case: str) -> None:
    torch.manual_seed(0)
    wanted = {backend: repr(ALLOCATING[case](backend)) for backend in (None, "torch")}
    for backend, want in wanted.items():
        torch.manual_seed(0)
        with torch.device("meta"):  # as torch.set_default_device("cuda") in a user's script
            assert repr(ALLOCATING[case](backend)) == want

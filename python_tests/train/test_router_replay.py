"""Router replay: recorded experts, the router's gates for them, gradients to the router."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")

from _fakes import tiny_model
from _moe import NUM_EXPERTS, NUM_LAYERS, TOP_K, block_by_hand, own_routes, tiny_moe

from skyrl_fast.batch import StepBatch
from skyrl_fast.config import AlgorithmConfig
from skyrl_fast.train.model.loading import checkpoint_gradients
from skyrl_fast.train.model.micro_batch import plan_micro_batches
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.model.router_replay import RouterReplay
from skyrl_fast.train.update import accumulate_gradient

IDS = torch.tensor([[3, 7, 1, 9, 4, 12], [5, 5, 8, 2, 11, 6]])


def random_routes(shape: tuple[int, ...], layers: int = NUM_LAYERS, seed: int = 1) -> torch.Tensor:
    scores = torch.rand(*shape, layers, NUM_EXPERTS, generator=torch.Generator().manual_seed(seed))
    return scores.argsort(-1)[..., :TOP_K]


def everywhere(ids: torch.Tensor) -> torch.Tensor:
    return torch.zeros(ids.shape, dtype=torch.bool)


KINDS = ["qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "deepseek_v3", "gpt_oss"]


@pytest.mark.spec("replay.same-routes")
@pytest.mark.parametrize("kind", KINDS)
def test_replaying_model_routes_gives_the_same_logits(kind: str) -> None:
    model = tiny_moe(kind)
    routes = own_routes(model, IDS)
    with torch.no_grad():
        free = model(input_ids=IDS).logits
        replay = RouterReplay(model)
        with replay.routes(routes, everywhere(IDS)):
            replayed = model(input_ids=IDS).logits
        # The same numbers in the same order, but for DeepSeek's added 1e-20 and GPT-OSS's softmax
        # over the chosen: a few bits.
        torch.testing.assert_close(replayed, free, atol=2e-5, rtol=1e-5)
        if kind in ("qwen3_moe", "olmoe", "mixtral"):
            assert torch.equal(replayed, free)
        with replay.routes((routes + 1) % NUM_EXPERTS, everywhere(IDS)):
            assert not torch.allclose(model(input_ids=IDS).logits, free, atol=1e-2)
        assert torch.equal(model(input_ids=IDS).logits, free)  # outside the context: unchanged


@pytest.mark.spec("replay.recorded-experts")
def test_other_routes_equal_a_handwritten_block() -> None:
    block = tiny_moe().model.layers[1].mlp
    hidden = torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(0))
    routes = random_routes((7,), layers=1)
    replay = RouterReplay(torch.nn.ModuleDict({"block": block}))
    block(hidden)  # detects the formula of the gate weights
    with replay.routes(routes, everywhere(hidden[0, :, 0])):
        got = block(hidden)[0]
    wanted = block_by_hand(block, hidden[0], routes[:, 0])
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)  # other order of summation


def test_router_gets_gradients_through_the_gates() -> None:
    """A finite difference of a router weight matches its gradient; the experts are fixed."""
    model = tiny_moe().double()
    model.set_experts_implementation("eager")  # the default one has no float64
    weight = model.model.layers[0].mlp.gate.weight
    replay = RouterReplay(model)
    routes = random_routes(IDS.shape)

    def loss() -> torch.Tensor:
        with replay.routes(routes, everywhere(IDS)):
            return model(input_ids=IDS).logits.log_softmax(-1)[..., 3].sum()

    loss().backward()
    gradient = weight.grad.clone()
    assert float(gradient.abs().max()) > 1e-3
    step = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)).double()
    values = []
    for scale in (1e-3, -1e-3):
        with torch.no_grad():
            weight += scale * step
            values.append(loss())
            weight -= scale * step
    slope = float(values[0] - values[1]) / 2e-3
    # gates are float32 inside (softmax of the router), so differences have an error of about 1e-3
    assert slope == pytest.approx(float((gradient * step).sum()), rel=2e-2, abs=1e-3)


@pytest.mark.spec("replay.unrecorded-tokens")
def test_tokens_without_a_route_are_routed_freely() -> None:
    model = tiny_moe()
    replay = RouterReplay(model)
    routes = own_routes(model, IDS)
    masked = everywhere(IDS)
    masked[:, 2:] = True
    wrong = torch.where(masked[..., None, None], torch.zeros_like(routes), routes)
    with torch.no_grad():
        free = model(input_ids=IDS).logits
        with replay.routes(wrong, masked):  # values in masked cells are ignored
            assert torch.equal(model(input_ids=IDS).logits, free)
        with replay.routes(random_routes(IDS.shape), torch.ones_like(masked)):
            assert torch.equal(model(input_ids=IDS).logits, free)
        first = wrong.clone()
        first[:, :1] = (first[:, :1] + 1) % NUM_EXPERTS
        with replay.routes(first, masked):
            assert not torch.equal(model(input_ids=IDS).logits, free)


def test_layers_without_experts_have_columns_that_are_not_read() -> None:
    model = tiny_moe("qwen3_moe", mlp_only_layers=[0])
    replay = RouterReplay(model)
    recorded = own_routes(model, IDS)
    assert recorded.shape[2] == 1
    padded = torch.cat([torch.zeros_like(recorded), recorded], 2)  # as vLLM counts: all layers
    with torch.no_grad():
        free = model(input_ids=IDS).logits
        for routes in (recorded, padded):
            with replay.routes(routes, everywhere(IDS)):
                assert torch.equal(model(input_ids=IDS).logits, free)


def test_gradient_checkpointing_recomputes_with_the_same_routes() -> None:
    gradients = []
    for checkpointing in (False, True):
        model = tiny_moe().train()
        if checkpointing:
            checkpoint_gradients(model)
        policy = Policy(model, router_replay=True)
        batch = routed_batch()
        (micro,) = plan_micro_batches(batch, 1000, router_replay=True)
        policy.logprobs(micro)[0].sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (random_routes((2, 6)) + NUM_EXPERTS, "expected 0 to 3, got 4 to 7"),
        (random_routes((2, 6)) - 1, "expected 0 to 3, got -1"),
        (torch.zeros(2, 6, NUM_LAYERS, TOP_K, dtype=torch.uint8), "got one twice"),
        (random_routes((2, 5)), r"got \(2, 5, 2, 2\) and \(2, 6\)"),
        (random_routes((2, 6), layers=1), "routers, or for its 2 or more layers, got 1"),
        (random_routes((2, 6))[..., :1], "6 with 1|12 with 1"),
    ],
)
def test_invalid_routes_are_refused(routes: torch.Tensor, message: str) -> None:
    model = tiny_moe()
    replay = RouterReplay(model)
    with pytest.raises(ValueError, match=message), replay.routes(routes, everywhere(IDS)):
        model(input_ids=IDS)


@pytest.mark.spec("replay.settings")
def test_models_without_known_routers_are_refused() -> None:
    with pytest.raises(ValueError, match="Qwen2ForCausalLM is no mixture of experts"):
        Policy(tiny_model(), router_replay=True)
    block = torch.nn.Module()
    block.experts, block.gate = torch.nn.ModuleList(), torch.nn.Linear(4, 2)
    with pytest.raises(ValueError, match="not supported: wanted a block"):
        RouterReplay(torch.nn.Sequential(block))

    class CubicRouter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4, 2))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logits = torch.arange(4.0).expand(len(x), 4)
            return logits, logits[:, :2] ** 3, torch.zeros(len(x), 2, dtype=torch.int64)

    block.gate = CubicRouter()
    RouterReplay(torch.nn.Sequential(block))
    with pytest.raises(ValueError, match="CubicRouter is not supported: its weights"):
        block.gate(torch.ones(3, 2))


# --- policy ------------------------------------------------------------------------------------


def routed_batch(*, agree: bool = True, captured: int | None = None) -> StepBatch:
    """Two trajectories: one of two steps that extend each other, one of one step."""
    prompts = [[3, 4, 5], [3, 4, 5, 6, 7, 8], [9, 10]]
    responses = [[6, 7], [9, 9, 4], [11, 12]]
    full = random_routes((8,), seed=5).numpy().astype(np.uint8)
    second = full.copy()
    if not agree:
        second[1] = (second[1] + 1) % NUM_EXPERTS
    records = [full[:4], second, random_routes((3,), seed=6).numpy().astype(np.uint8)]
    if captured is not None:
        records[2] = records[2][:captured]
    output: dict[str, Any] = {
        "prompt_token_ids": prompts,
        "response_ids": responses,
        "loss_masks": [[1, 1], [1, 1, 1], [1, 1]],
        "rewards": [0.0, 1.0, 0.0],
        "rollout_logprobs": [[-1.0] * 2, [-1.0] * 3, [-1.0] * 2],
        "rollout_expert_indices": records,
        "trajectory_ids": [("a", 0), ("a", 0), ("a", 1)],
        "is_last_step": [False, True, True],
    }
    batch = StepBatch.from_generator_output(output, step_wise=True)
    return batch.with_(advantages=torch.linspace(-1, 1, 7))


def logprobs_by_row(model: Any, batch: StepBatch) -> torch.Tensor:
    """(A,) each row alone, by the model's full logits at the row's record."""
    replay = RouterReplay(model)
    result = []
    for row in range(batch.num_rows):
        tokens = batch.tokens[batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]].long()
        record = batch.expert_indices[batch.cu_experts[row] : batch.cu_experts[row + 1]]
        routes = torch.zeros(1, len(tokens), NUM_LAYERS, TOP_K, dtype=torch.uint8)
        routes[0, : len(record)] = record
        mask = (torch.arange(len(tokens)) >= len(record))[None]
        with torch.no_grad(), replay.routes(routes, mask):
            values = model(input_ids=tokens[None]).logits[0].log_softmax(-1)
        picked = values[:-1].gather(1, tokens[1:, None])[:, 0]
        result.append(picked[len(picked) - int(batch.response_lengths[row]) :])
    return torch.cat(result)


@pytest.mark.spec("replay.shared-sequence")
@pytest.mark.parametrize("agree", [True, False])
@pytest.mark.parametrize("budget", [1, 1000])
def test_policy_replays_the_record_of_each_row(agree: bool, budget: int) -> None:
    batch = routed_batch(agree=agree, captured=1)
    policy = Policy(tiny_moe(), router_replay=True, max_tokens_per_microbatch=budget)
    wanted = logprobs_by_row(tiny_moe(), batch)
    # float32 noise: other order of sums where rows share a pass
    torch.testing.assert_close(policy.batch_logprobs(batch), wanted, atol=2e-5, rtol=0)
    free = Policy(tiny_moe()).batch_logprobs(batch)
    assert float((free - wanted).abs().max()) > 0.05


@pytest.mark.spec("replay.shared-sequence")
def test_rows_share_a_sequence_only_if_their_records_agree() -> None:
    for agree, sequences in ((True, 2), (False, 3)):
        batch = routed_batch(agree=agree)
        for replay, wanted in ((True, sequences), (False, 2)):
            (micro,) = plan_micro_batches(batch, 1000, router_replay=replay)
            assert micro.input_ids.shape[0] == wanted
    (micro,) = plan_micro_batches(routed_batch(), 1000, router_replay=True)
    assert micro.expert_indices.shape == (2, 9, NUM_LAYERS, TOP_K)
    assert micro.router_padding_mask.sum(1).tolist() == [1, 6]  # 8 of 9 tokens; 3 of 4, 5 padded


def test_gradient_does_not_depend_on_the_split() -> None:
    gradients = []
    for budget in (1000, 1):
        model = tiny_moe()
        policy = Policy(model, router_replay=True, max_tokens_per_microbatch=budget)
        accumulate_gradient(policy, routed_batch(), algorithm=AlgorithmConfig())
        gradients.append([p.grad.clone() for p in model.parameters()])
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-4)


def test_batch_without_routes_error_names_the_missing_setting() -> None:
    batch = routed_batch().with_(expert_indices=None, cu_experts=None)
    policy = Policy(tiny_moe(), router_replay=True)
    with pytest.raises(ValueError, match="enable_return_routed_experts=true"):
        policy.batch_logprobs(batch)
    (micro,) = plan_micro_batches(batch, 1000)
    with pytest.raises(ValueError, match="planned with its routes"):
        policy.logprobs(micro)


@pytest.mark.parametrize("tree", [False, True])
def test_batch_of_placeholders_has_no_routes_and_trains_nothing(tree: bool) -> None:
    output: dict[str, Any] = {  # every trajectory failed, so the engine recorded nothing
        "prompt_token_ids": [[3, 4], [0]],
        "response_ids": [[], []],
        "loss_masks": [[], []],
        "rewards": [0.0, 0.0],
        "rollout_logprobs": [[], []],
        "trajectory_ids": [("a", 0), ("a", 1)],
        "is_last_step": [True, True],
    }
    batch = StepBatch.from_generator_output(output, step_wise=True)
    policy = Policy(tiny_moe(), router_replay=True, tree=tree)
    assert policy.batch_logprobs(batch).tolist() == []
    batch = batch.with_(advantages=torch.zeros(0))
    metrics = accumulate_gradient(policy, batch, algorithm=AlgorithmConfig())
    assert (metrics["policy/loss"], metrics["policy/num_micro_batches"]) == (0.0, 0.0)


@pytest.mark.spec("replay.weight-probe")
def test_logprobs_of_sequences_at_given_routes() -> None:
    policy = Policy(tiny_moe(), router_replay=True)
    sequences = [[3, 7, 1, 9], [5, 2], [8, 1, 1, 4, 6, 2]]
    recorded = [
        own_routes(policy.model, torch.tensor([tokens]))[0].numpy().astype(np.uint16)
        for tokens in sequences
    ]
    alone = [policy.sequence_logprobs([tokens])[0] for tokens in sequences]
    together = policy.sequence_logprobs(sequences)
    for (values, deviation), wanted in zip(together, alone, strict=True):
        assert values == pytest.approx(wanted[0], abs=1e-5)
        assert deviation == pytest.approx(wanted[1], rel=1e-5)
    assert policy.sequence_logprobs(sequences, recorded) == together
    # The last token predicts nothing.
    shorter = [of_row[:-1] for of_row in recorded]
    assert policy.sequence_logprobs(sequences, shorter) == together
    moved = policy.sequence_logprobs(sequences, [(of + 1) % NUM_EXPERTS for of in recorded])
    for (values, _), (free, _) in zip(moved, alone, strict=True):
        assert max(abs(a - b) for a, b in zip(values, free, strict=True)) > 0.05
    with pytest.raises(ValueError, match="router_replay is off"):
        Policy(tiny_moe()).sequence_logprobs(sequences, recorded)


def test_exported_weights_have_checkpoint_names(tmp_path: Any) -> None:
    from safetensors.torch import load_file

    model = tiny_moe()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    sent = dict(Policy(model).named_weights())
    assert sent.keys() == saved.keys()
    for name, value in saved.items():
        assert torch.equal(sent[name], value), name


@pytest.mark.spec("replay.reference-model")
def test_reference_routes_freely(tmp_path: Any) -> None:
    from skyrl_fast.config import Config
    from skyrl_fast.train.model.models import make_models
    from skyrl_fast.train.parallel.ranks import SINGLE_RANK

    tiny_moe().save_pretrained(tmp_path)
    config = Config()
    config.trainer.train_batch_size = 2
    config.trainer.policy_mini_batch_size = 2
    config.trainer.device = "cpu"
    config.trainer.policy.model.path = str(tmp_path)
    config.trainer.policy.moe_enable_routing_replay = True
    config.trainer.algorithm.use_kl_loss = True
    models = make_models(config, None, 2, SINGLE_RANK)
    assert models.trained[None].policy.router_replay
    assert models.reference is not None
    assert not models.reference.router_replay

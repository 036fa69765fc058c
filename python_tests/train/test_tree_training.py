"""Training on prefix trees: loss and gradients equal those of independent rows."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from _fakes import tiny_model
from _float64 import float64_throughout
from _moe import NUM_EXPERTS, NUM_LAYERS, TOP_K, tiny_moe
from _trees import agent_batch, batch_of_rows, size_of
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.tiny_models import tiny_model as random_model
from skyrl_fast.batch import StepBatch
from skyrl_fast.batch.token_counts import token_counts
from skyrl_fast.config import AlgorithmConfig, OptimizerConfig
from skyrl_fast.ops.passes.plan import PassPlan
from skyrl_fast.ops.prefix_tree.tree import build_prefix_tree
from skyrl_fast.train.model import micro_batch
from skyrl_fast.train.model.critic import Critic, ValueModel
from skyrl_fast.train.model.forward_pass import MicroBatch, NodeTree
from skyrl_fast.train.model.loading import checkpoint_gradients, load_model, remove_dropout
from skyrl_fast.train.model.micro_batch import plan_micro_batches, response_positions
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.model.tree_forward import last_hidden_states, prepare_for_trees
from skyrl_fast.train.model.tree_states import TreeSegments
from skyrl_fast.train.update import accumulate_gradient

SIZES = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
KINDS = ("Qwen2", "Qwen3", "Llama")


def tiny(kind: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | changes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype)
    for parameter in model.parameters():  # larger than the default: gradients that differ
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.fixture
def independent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable shared sequences, so that without trees each row is computed separately."""

    def alone(*arrays: torch.Tensor, **options: Any) -> PassPlan:
        if not options["tree"]:
            options["trajectory_ids"] = torch.arange(len(options["rows"]))
            if options["keep_trajectories"]:  # all rows in one pass
                options |= {"keep_trajectories": False, "token_budget": 1 << 40}
        return PassPlan(*arrays, **options)

    monkeypatch.setattr(micro_batch, "PassPlan", alone)


def gradients(
    model: Any, batch: StepBatch, algorithm: AlgorithmConfig | None = None, **options: Any
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    policy = Policy(model, **options)
    metrics = accumulate_gradient(policy, batch, algorithm=algorithm or AlgorithmConfig())
    return metrics, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(
    one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], tolerance: float
) -> None:
    assert one.keys() == two.keys()
    assert one
    for name, value in one.items():
        error = float((value - two[name]).norm() / value.norm().clamp_min(1e-12))
        assert error <= tolerance, (name, error)


# --- models of transformers ----------------------------------------------------------------------


@pytest.mark.spec("tree.equal-gradients")
@pytest.mark.usefixtures("independent")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradients_equal_those_of_rows(kind: str, seed: int) -> None:
    batch = agent_batch(seed)
    metrics, wanted = gradients(tiny(kind), batch, max_tokens_per_microbatch=1)
    for budget in (1, 40, 100_000):
        on_trees, got = gradients(tiny(kind), batch, max_tokens_per_microbatch=budget, tree=True)
        assert on_trees["policy/loss"] == pytest.approx(metrics["policy/loss"], rel=1e-6)
        # norms and rotary embeddings are float32 inside
        assert_same_gradients(wanted, got, 1e-6)
        for name in ("policy/policy_entropy", "policy/trained_tokens", "policy/row_tokens"):
            assert on_trees[name] == pytest.approx(metrics[name], rel=1e-6)
        if budget > 1:
            assert on_trees["policy/forward_tokens"] < metrics["policy/forward_tokens"]


@pytest.mark.usefixtures("independent")
@pytest.mark.parametrize(
    "algorithm",
    [
        AlgorithmConfig(policy_loss_type="gspo"),
        AlgorithmConfig(policy_loss_type="gspo", sequence_scope="row"),
        AlgorithmConfig(policy_loss_type="kl_cov"),
        AlgorithmConfig(use_entropy_loss=True, loss_reduction="trajectory_mean"),
        AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.3, loss_reduction="prompt_mean"),
    ],
)
def test_every_kind_of_loss(algorithm: AlgorithmConfig) -> None:
    batch = agent_batch(7)
    batch = batch.with_(ref_logprobs=batch.rollout_logprobs * 0.9)
    metrics, wanted = gradients(tiny("Qwen2"), batch, algorithm, max_tokens_per_microbatch=1)
    on_trees, got = gradients(
        tiny("Qwen2"), batch, algorithm, max_tokens_per_microbatch=50, tree=True
    )
    assert on_trees["policy/loss"] == pytest.approx(metrics["policy/loss"], rel=1e-6)
    assert_same_gradients(wanted, got, 1e-6)


def test_prepared_model_is_unchanged_without_trees(tmp_path: Any) -> None:
    model, plain = tiny("Qwen2"), tiny("Qwen2")
    policy = Policy(model, tree=True)
    ids = torch.randint(0, 16, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    for options in ({}, {"attention_mask": mask}):
        wanted = plain(input_ids=ids, **options).logits
        assert torch.equal(model(input_ids=ids, **options).logits, wanted)
    probe = [[1, 2, 3]]
    assert policy.sequence_logprobs(probe) == Policy(plain).sequence_logprobs(probe)
    model.save_pretrained(tmp_path)
    assert "skyrl_fast" not in (tmp_path / "config.json").read_text()


@pytest.mark.usefixtures("independent")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bfloat16_error_is_within_that_of_row_order(device: str) -> None:
    sizes = {"hidden_size": 32, "vocab_size": 64}
    forks = {"num_groups": 2, "samples": 4, "turns": 3, "vocabulary": 60}
    if device == "cuda":  # FlexAttention takes it at once, a mask of all pairs in chunks
        sizes = {"hidden_size": 256, "head_dim": 64, "num_hidden_layers": 4, "vocab_size": 512}
        forks = {"num_groups": 12, "samples": 8, "turns": 5, "vocabulary": 400}
    batch = agent_batch(0, **forks)
    exact = gradients(tiny("Qwen2", torch.float32, **sizes).to(device), batch)[1]
    runs = [(False, 1), (False, 100_000), (True, 100_000), (True, 900)]
    found = [
        gradients(
            tiny("Qwen2", torch.float32, **sizes).to(device),
            batch,
            tree=tree,
            max_tokens_per_microbatch=budget,
            dtype=torch.bfloat16,
        )[1]
        for tree, budget in runs
    ]

    def distance(one: dict[str, torch.Tensor]) -> float:
        return sum(float((one[name] - exact[name]).norm() ** 2) for name in exact) ** 0.5

    rows = [distance(one) for one in found[:2]]
    trees = [distance(one) for one in found[2:]]
    assert 0 < max(trees) <= 1.2 * max(rows)


# --- a model that is float64 throughout ----------------------------------------------------------


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


# --- micro-batches -------------------------------------------------------------------------------


@pytest.mark.spec("tree.micro-batches", "tree.node-logprobs")
@pytest.mark.parametrize("budget", [1, 25, 60, 10_000])
@pytest.mark.parametrize("keep", [False, True])
def test_every_trained_token_is_predicted_once_from_its_parent_node(
    budget: int, keep: bool
) -> None:
    batch = agent_batch(5, num_groups=4)
    plan = plan_micro_batches(batch, budget, tree=True, keep_trajectories=keep)
    positions = torch.cat([response_positions(batch, micro) for micro in plan])
    trained = batch.loss_mask.nonzero().flatten()
    assert positions.sort().values.tolist() == trained.tolist()
    longest = int(batch.lengths.max())
    parts = [set(batch.trajectory_ids[micro.rows].tolist()) for micro in plan]
    for micro, members in zip(plan, parts, strict=True):
        assert micro.tree is not None
        nodes = micro.input_ids.shape[1]
        assert nodes <= max(budget, longest) or (keep and len(members) == 1)
        assert micro.rows.tolist() == sorted(micro.rows.tolist())
        copies = micro.copies if micro.copies is not None else torch.arange(len(micro.target_ids))
        places = response_positions(batch, micro)
        rows = torch.bucketize(places, batch.cu_responses[1:].long(), right=True)
        starts = batch.cu_seqlens[rows + 1] - batch.cu_responses[rows + 1] + places
        targets = micro.target_ids[copies]
        assert targets.tolist() == batch.tokens[starts].tolist()
        for node, start, row in zip(
            micro.hidden_index[copies].tolist(), starts.tolist(), rows.tolist(), strict=True
        ):
            path = []
            while node >= 0:  # the node's ancestors are the row up to the token
                path.append(int(micro.input_ids[0, node]))
                node = int(micro.tree.parents[node])
            assert path[::-1] == batch.tokens[int(batch.cu_seqlens[row]) : start].tolist()
    if keep:
        assert sum(len(members) for members in parts) == len(set().union(*parts))


@pytest.mark.spec("tree.shared-forward")
def test_groups_share_their_system_prompt_and_nothing_else_changes() -> None:
    rng = np.random.default_rng(0)
    system = rng.integers(4, 10, 20).tolist()
    rows = [
        {
            "prompt_token_ids": [*system, 10 + group],
            "response_ids": rng.integers(4, 16, 3).tolist(),
            "trajectory_ids": (f"p{group}", sample),
        }
        for group in range(6)
        for sample in range(2)
    ]
    batch = batch_of_rows(rows, rng).with_(loss_mask=torch.ones(36, dtype=torch.uint8))
    (micro,) = plan_micro_batches(batch, 1000, tree=True)
    inserted = [row["prompt_token_ids"] + row["response_ids"][:-1] for row in rows]
    assert micro.input_ids.shape[1] == size_of(inserted)
    # The system prompt counts once per pass: 20 nodes of 40, and 4 or 5 of each group.
    plan = plan_micro_batches(batch, 40, tree=True)
    assert [len(set(batch.group_ids[micro.rows].tolist())) for micro in plan] == [3, 3]
    assert max(micro.input_ids.shape[1] for micro in plan) <= 40
    for budget in (40, 1000):
        options = {"max_tokens_per_microbatch": budget}
        one, wanted = gradients(tiny("Qwen3"), batch, **options)
        two, got = gradients(tiny("Qwen3"), batch, tree=True, **options)
        assert two["policy/loss"] == pytest.approx(one["policy/loss"], rel=1e-6)
        assert_same_gradients(wanted, got, 1e-5)


def test_nodes_after_the_last_trained_token_are_omitted() -> None:
    rng = np.random.default_rng(0)
    row = {"prompt_token_ids": [4, 5], "response_ids": [6, 7, 8], "trajectory_ids": ("a", 0)}
    batch = batch_of_rows([row], rng)
    batch = batch.with_(loss_mask=torch.tensor([1, 1, 0], dtype=torch.uint8))
    (micro,) = plan_micro_batches(batch, 100, tree=True)
    assert micro.input_ids.tolist() == [[4, 5, 6]]
    assert micro.hidden_index.tolist() == [1, 2]
    assert micro.target_ids.tolist() == [6, 7]


def test_rows_that_share_a_trained_token_share_its_logits() -> None:
    rng = np.random.default_rng(0)
    row = {"prompt_token_ids": [4, 5], "response_ids": [6, 7], "trajectory_ids": ("a", 0)}
    other = {**row, "response_ids": [6, 8], "trajectory_ids": ("a", 1)}
    batch = batch_of_rows([row, other], rng)
    batch = batch.with_(loss_mask=torch.ones(4, dtype=torch.uint8))
    (micro,) = plan_micro_batches(batch, 100, tree=True)
    assert micro.input_ids.tolist() == [[4, 5, 6]]
    assert len(micro.target_ids) == 3
    assert micro.target_ids[micro.copies].tolist() == [6, 7, 6, 8]


@pytest.mark.spec("tree.metrics")
def test_token_counts_of_rows_merged_rows_and_trees() -> None:
    batch = agent_batch(4, stripped=0.0).with_(advantages=None)
    counts = token_counts(batch)
    assert counts.rows == batch.num_tokens
    assert counts.merged == batch.merged().num_tokens
    prefixes = {
        tuple(batch.tokens[first:end].tolist())
        for first, last in pairwise(batch.cu_seqlens.tolist())
        for end in range(first + 1, last + 1)
    }
    assert counts.tree == len(prefixes)
    assert counts.tree < counts.merged < counts.rows


# --- router replay -------------------------------------------------------------------------------


def routed(agree: bool) -> StepBatch:
    """Return two samples of one prompt, two steps each; shared routes agree or differ."""
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    prompt, first = [4, 5, 6], rng.integers(0, NUM_EXPERTS, (3, NUM_LAYERS, 1))
    for sample in range(2):
        history, record = prompt, first
        if not agree and sample:
            record = (first + np.array([[[0]], [[1]], [[0]]])) % NUM_EXPERTS
        for _ in range(2):
            answer = rng.integers(7, 12, 4).tolist()
            new = rng.integers(0, NUM_EXPERTS, (len(history) - len(record) + 3, NUM_LAYERS, 1))
            record = np.concatenate([record, new])
            routes = np.concatenate([record, (record + 1) % NUM_EXPERTS], 2).astype(np.uint8)
            rows.append(
                {
                    "prompt_token_ids": history,
                    "response_ids": answer,
                    "trajectory_ids": ("a", sample),
                    "rollout_expert_indices": routes,
                }
            )
            history = [*history, *answer, 12]
    assert TOP_K == 2
    return batch_of_rows(rows, rng)


@pytest.mark.spec("tree.routes")
@pytest.mark.usefixtures("independent")
@pytest.mark.parametrize("agree", [True, False])
def test_routes_are_replayed_and_different_routes_fork(agree: bool) -> None:
    batch = routed(agree)
    plans = [
        list(plan_micro_batches(batch, 1000, router_replay=replay, tree=True))
        for replay in (False, True)
    ]
    free, replayed = (plan[0].input_ids.shape[1] for plan in plans)
    assert replayed == free + (0 if agree else 2)  # from the second of three prompt tokens on
    (micro,) = plans[1]
    assert micro.expert_indices.shape == (1, replayed, NUM_LAYERS, TOP_K)
    _, wanted = gradients(tiny_moe(), batch, router_replay=True)
    _, got = gradients(tiny_moe(), batch, router_replay=True, tree=True)
    assert_same_gradients(wanted, got, 1e-4)  # experts do not support float64
    _, free_routes = gradients(tiny_moe(), batch, tree=True)
    name = next(n for n in got if n.endswith("gate.weight"))
    assert float((free_routes[name] - got[name]).norm() / got[name].norm()) > 1e-2


# --- the critic ----------------------------------------------------------------------------------


@pytest.mark.spec("tree.reference-and-critic")
@pytest.mark.usefixtures("independent")
def test_critic_on_trees() -> None:
    batch = agent_batch(6)
    found = []
    for tree in (False, True):
        torch.manual_seed(0)
        model = ValueModel(tiny("Llama", torch.float32).model)
        critic = Critic(
            model,
            OptimizerConfig(lr=1e-3),
            total_steps=1,
            mini_batch_size=3,
            max_tokens_per_microbatch=60,
            tree=tree,
        )
        values = critic.batch_values(batch)
        metrics = critic.update(batch.with_(values=values, returns=values + batch.advantages))
        found.append((values, metrics["critic/critic_loss"], metrics["critic/grad_norm"]))
    (values, loss, norm), (on_trees, tree_loss, tree_norm) = found
    torch.testing.assert_close(on_trees, values, atol=1e-5, rtol=1e-5)  # float32
    assert tree_loss == pytest.approx(loss, rel=1e-4)
    assert tree_norm == pytest.approx(norm, rel=1e-4)


# --- refusals ------------------------------------------------------------------------------------


def model_of(name: str, **changes: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.mark.spec("tree.unsupported-models")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: model_of("MiniMax", layer_types=["linear_attention", "full_attention"]),
            "layers of linear_attention, which depend on positions",
        ),
        (
            lambda: model_of("Llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
            "depends on the longest row",
        ),
    ],
)  # fmt: skip
def test_unsupported_models_are_refused_with_the_reason(make: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=f"cannot be trained as trees.*{reason}"):
        Policy(make(), tree=True)


def wide(model: Any) -> Any:
    """Return the model with large random weights, so that any wrong attention shows."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def doge(**changes: Any) -> Any:
    model = wide(model_of("Doge", head_dim=4, **changes))
    for layer in model.model.layers:  # as initialised: all tokens of short rows count alike
        torch.nn.init.zeros_(layer.self_attn.A)
    return model


@pytest.mark.spec("tree.unsupported-models")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        # Its mask has a window that its attention function is not told.
        (
            lambda: wide(
                tiny_moe(
                    "qwen2_moe", use_sliding_window=True, sliding_window=4096, max_window_layers=1
                )
            ),
            "are not those of the rows",
        ),
        # Attends to the best 8 tokens of longer rows, which no layer type says.
        (lambda: doge(keep_window_size=8), "are not those of the rows"),
        (lambda: doge(), "its setting keep_window_size=2048 may limit"),
        (
            lambda: model_of(
                "DeepseekV3", q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8,
                qk_rope_head_dim=8, v_head_dim=8, num_key_value_heads=4,
            ),
            "keys and values of one head size, got 16 and 8",
        ),
    ],
    ids=["window of the mask", "small window", "large window", "MLA"],
)  # fmt: skip
def test_attention_that_trees_would_compute_wrongly_is_refused(make: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=f"cannot be trained as trees.*{reason}"):
        Policy(make(), tree=True)


def llama4(**changes: Any) -> dict[str, Any]:
    sizes = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 24}
    rope = {"no_rope_layers": [1, 1, 1, 0], "attn_temperature_tuning": False}
    return {"attention_chunk_size": 6, **sizes, **rope, **changes}


LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Layers with windows, chunks, sinks, capped scores or without positions.
PLACES: dict[str, dict[str, Any]] = {
    "Gemma2": {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 1.5},
    "Gemma3Text": {
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "GptOss": LOCAL_EXPERTS,
    "Mistral": {},
    "Mixtral": LOCAL_EXPERTS,
    "Qwen2": {"use_sliding_window": True, "max_window_layers": 2},
    "Qwen3": {"use_sliding_window": True, "max_window_layers": 2},
    "Phi3": {},
    "Cohere2": {},
    "Olmo3": {},
    "Llama4Text": llama4(),
    "SmolLM3": {"no_rope_layers": [1, 0, 1, 0], "use_sliding_window": True, "max_window_layers": 2},
}


def places_model(name: str, **changes: Any) -> Any:
    import transformers

    window = {} if name == "Llama4Text" else {"sliding_window": 5}
    sizes = SIZES | {"num_hidden_layers": 4} | window | PLACES[name] | changes
    config = getattr(transformers, f"{name}Config")(**sizes)
    # The other implementations of experts do not take float64.
    experts = {"experts_implementation": "eager"} if "num_local_experts" in sizes else {}
    model = transformers.AutoModel.from_config(config, **experts).double().eval()
    return wide(model)


def hidden_and_gradients(
    model: Any, states: Callable[[], list[torch.Tensor]]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(1)
    hidden = states()
    loss = sum((h * torch.randn(h.shape, dtype=h.dtype)).sum() for h in hidden)
    model.zero_grad()
    loss.backward()
    return hidden, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@contextlib.contextmanager
def recomputed(model: Any, recomputes: bool) -> Iterator[None]:
    """Recompute the layers in the backward pass."""
    if recomputes:
        checkpoint_gradients(model)
        remove_dropout(model.train())
    yield
    if recomputes:
        model.gradient_checkpointing_disable()
        model.eval()


@pytest.mark.spec("tree.equal-gradients", "tree.reach", "tree.sinks-and-caps", "tree.paths")
@pytest.mark.parametrize("name", PLACES)
def test_layers_that_look_at_places(name: str) -> None:
    model = places_model(name)
    tree_rows = [
        [4, 5, 6, 7, 8, 9, 10, 11, 12],
        [4, 5, 6, 7, 8, 9, 3, 3, 4, 5, 6, 7, 8],
        [4, 5, 13],
    ]
    rows = [torch.tensor(row) for row in [*tree_rows, [9, 8, 7, 6, 5, 4, 3]]]

    def alone() -> list[torch.Tensor]:
        return [model(input_ids=r[None], use_cache=False).last_hidden_state[0] for r in rows]

    wanted, wanted_gradients = hidden_and_gradients(model, alone)
    prepare_for_trees(model)
    tree = build_prefix_tree(torch.cat(rows), torch.tensor([0, *map(len, rows)]).cumsum(0))
    nothing = torch.zeros(0, dtype=torch.int64)
    nodes = NodeTree(tree.parents, tree.ends, tree.positions.long()[None])
    micro = MicroBatch(tree.tokens.long()[None], *[nothing] * 4, tree=nodes)

    def on_tree() -> list[torch.Tensor]:
        states = last_hidden_states(model, micro, torch.device("cpu"))
        return [states[tree.nodes_of(number).long()] for number in range(len(rows))]

    def by_path() -> list[torch.Tensor]:
        states = last_hidden_states(model, micro, torch.device("cpu"), most_nodes=8)
        return [states[tree.nodes_of(number).long()] for number in range(len(rows))]

    # alone: by the attention function that also takes trees
    for states, recomputes in ((on_tree, False), (by_path, False), (by_path, True), (alone, False)):
        with recomputed(model, recomputes):
            got, got_gradients = hidden_and_gradients(model, states)
        for one, two in zip(got, wanted, strict=True):
            # norms, rotary embeddings and Gemma 2's softmax are float32 inside
            torch.testing.assert_close(one, two, atol=2e-5, rtol=2e-5)
        for one, two in zip(got_gradients, wanted_gradients, strict=True):
            assert float((one - two).norm()) <= 1e-5 * float(two.norm())


@pytest.mark.spec("tree.reach")
@pytest.mark.usefixtures("independent")
@settings(max_examples=12)
@given(
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(["Mistral", "Gemma3Text", "Qwen3"]),
    window=st.integers(2, 40),  # keys that are seen alone have no gradient but rounding
    budget=st.sampled_from([1, 30, 100, 10_000]),
)
def test_random_histories_with_windows(seed: int, kind: str, window: int, budget: int) -> None:
    import transformers

    def windowed() -> Any:
        sizes = SIZES | PLACES[kind] | {"sliding_window": window, "num_hidden_layers": 2}
        if "layer_types" in sizes:
            sizes["layer_types"] = sizes["layer_types"][:2]
        if "max_window_layers" in sizes:
            sizes["max_window_layers"] = 1
        config = getattr(transformers, f"{kind}Config")(**sizes)
        return wide(transformers.AutoModelForCausalLM.from_config(config).double().eval())

    batch = agent_batch(seed)
    metrics, wanted = gradients(windowed(), batch, max_tokens_per_microbatch=1)
    on_trees, got = gradients(windowed(), batch, max_tokens_per_microbatch=budget, tree=True)
    assert on_trees["policy/loss"] == pytest.approx(metrics["policy/loss"], rel=1e-5, abs=1e-9)
    assert_same_gradients(wanted, got, 1e-5)  # norms and rotary embeddings are float32 inside


DELTA_NET = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
}
MAMBA2 = {
    **{"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_ssm": 32, "mamba_expand": 2},
    **{"mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8},
}
# Layers with a state: a recurrence, a short convolution, or both.
STATES: dict[str, dict[str, Any]] = {
    "Qwen3Next": {**DELTA_NET, "mlp_only_layers": [0, 1]},
    "Qwen3_5Text": DELTA_NET,
    "OlmoHybrid": DELTA_NET,
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "Bamba": {**MAMBA2, "attn_layer_indices": [1]},
    "FalconH1": MAMBA2,
    "GraniteMoeHybrid": {
        **MAMBA2,
        **{"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 0},
    },
    # Its time steps have a least value: no token leaves its state as it is.
    "Mamba2": {
        **{"num_heads": 4, "head_dim": 8, "expand": 2, "state_size": 8, "n_groups": 2},
        **{"chunk_size": 8, "time_step_limit": (0.1, float("inf"))},
    },
}
STATE_ROWS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 80)), min_size=1, max_size=6)


def state_model(name: str, **changes: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{name}Config")(**SIZES | STATES[name] | changes)
    model = transformers.AutoModel.from_config(config).double().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.spec("tree.states", "tree.equal-gradients", "tree.paths")
@pytest.mark.parametrize("name", STATES)
@settings(max_examples=6)
@given(
    forks=STATE_ROWS,
    seed=st.integers(0, 1000),
    most_nodes=st.integers(1, 150),
    recomputes=st.booleans(),
)
def test_layers_with_a_state(
    name: str, forks: list[tuple[int, int]], seed: int, most_nodes: int, recomputes: bool
) -> None:
    """Random tries, with segments shorter and longer than a recurrence's chunk."""
    torch.manual_seed(seed)
    model = state_model(name)
    rows: list[torch.Tensor] = []
    for shared, own in forks:  # each row leaves the one before
        above = rows[-1][:shared] if rows else torch.zeros(0, dtype=torch.int64)
        rows.append(torch.cat([above, torch.randint(3, 16, (own,))]))
    rows = [row for row in rows if len(row) > 1] or [torch.tensor([3, 4])]
    tree = build_prefix_tree(torch.cat(rows), torch.tensor([0, *map(len, rows)]).cumsum(0))
    nothing = torch.zeros(0, dtype=torch.int64)
    nodes = NodeTree(tree.parents, tree.ends, tree.positions.long()[None])
    micro = MicroBatch(tree.tokens.long()[None], *[nothing] * 4, tree=nodes)

    def alone() -> list[torch.Tensor]:
        return [model(input_ids=r[None], use_cache=False).last_hidden_state[0] for r in rows]

    def on_tree(most_nodes: int | None = None) -> list[torch.Tensor]:
        states = last_hidden_states(model, micro, torch.device("cpu"), most_nodes=most_nodes)
        return [states[tree.nodes_of(number).long()] for number in range(len(rows))]

    def by_path() -> list[torch.Tensor]:
        return on_tree(most_nodes)

    with float64_throughout(model):
        wanted, wanted_gradients = hidden_and_gradients(model, alone)
    prepare_for_trees(model)
    with float64_throughout(model):
        for states, again in ((on_tree, False), (by_path, recomputes), (alone, False)):
            with recomputed(model, again):
                got, got_gradients = hidden_and_gradients(model, states)
            for one, two in zip(got, wanted, strict=True):
                torch.testing.assert_close(one, two, atol=1e-9, rtol=1e-9)
            for one, two in zip(got_gradients, wanted_gradients, strict=True):
                # relative to the gradient; those of weights that hardly count are rounding
                assert float((one - two).norm()) <= 1e-8 * max(1e-3, float(two.norm()))


@pytest.mark.usefixtures("independent")
@pytest.mark.parametrize("budget", [1, 40, 100_000])
def test_states_in_cut_trees_and_in_recomputed_layers(budget: int, tmp_path: Path) -> None:
    import transformers

    sizes = SIZES | DELTA_NET
    config = transformers.Qwen3_5TextConfig(**sizes)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    grads = []
    for checkpointing, tree in ((False, False), (True, True)):
        model = load_model(
            str(tmp_path), device=torch.device("cpu"), gradient_checkpointing=checkpointing
        ).double()
        with float64_throughout(model, tensors=False):
            options = {"tree": tree, "max_tokens_per_microbatch": budget if tree else 1}
            grads.append(gradients(model, agent_batch(3), **options)[1])
    assert_same_gradients(*grads, 1e-6)  # norms are float32 inside


@pytest.mark.spec("tree.states")
def test_ranks_do_not_share_the_tokens_of_layers_with_a_state() -> None:
    with pytest.raises(ValueError, match="ranks cannot share the tokens of layers with a state"):
        prepare_for_trees(state_model("Lfm2"), shares_tokens=True)


@pytest.mark.spec("tree.states")
def test_padding_is_one_segment_and_forks_begin_new_ones() -> None:
    #   0 - 1 - 2 - 3      a row that ends at 3, one that forks after 1, three padding nodes
    #        \ 4 - 5
    parents = torch.tensor([-1, 0, 1, 2, 1, 4, -1, -1, -1], dtype=torch.int32)
    segments = TreeSegments(parents, torch.device("cpu"))
    padded = segments.padded(pads_parents=True)
    assert [(group.count, group.length) for group in padded.groups] == [(2, 3), (2, 2)]
    assert padded.nodes.tolist() == [0, 1, 1, 6, 7, 8, 2, 3, 4, 5]
    assert padded.padding is not None
    assert padded.padding.nonzero().flatten().tolist() == [2]
    assert [group.has_children for group in padded.groups] == [True, False]
    assert padded.groups[1].parents == [0, 0]
    assert padded.places.tolist() == [0, 1, 6, 7, 8, 9, 3, 4, 5]
    nodes, own = segments.with_tails(2)
    assert nodes.tolist() == [-2, -1, 0, 1, 0, 1, 2, 3, 0, 1, 4, 5, -2, -1, 6, 7, 8]
    assert nodes[own].tolist() == list(range(9))
    exact = segments.padded(pads_parents=False)
    assert exact.padding is None and exact.nodes.tolist()[:5] == [6, 7, 8, 0, 1]


@pytest.mark.spec("tree.states")
def test_segments_are_computed_in_chunks_of_their_length(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as module

    name = "torch_chunk_gated_delta_rule"
    function = getattr(module, name)
    function = getattr(function, "without_trees", function)
    calls: list[tuple[int, int, int]] = []

    @functools.wraps(function)
    def recorded(query: torch.Tensor, *args: Any, **options: Any) -> Any:
        calls.append((*query.shape[:2], options.get("chunk_size", 64)))
        return function(query, *args, **options)

    monkeypatch.setattr(module, name, recorded)
    model = state_model("Qwen3_5Text")
    prepare_for_trees(model)
    calls.clear()
    # 40 nodes, then 6 branches of 10 and one of 50: a call with 64 is cheaper than two
    for branches in ([10] * 6 + [50], [10, 50]):
        rows = [torch.arange(40) % 3 + 4]
        rows += [
            torch.cat([rows[0], torch.tensor([7 + n]), torch.arange(length - 1) % 3 + 4])
            for n, length in enumerate(branches)
        ]
        tree = build_prefix_tree(torch.cat(rows), torch.tensor([0, *map(len, rows)]).cumsum(0))
        nothing = torch.zeros(0, dtype=torch.int64)
        nodes = NodeTree(tree.parents, tree.ends, tree.positions.long()[None])
        micro = MicroBatch(tree.tokens.long()[None], *[nothing] * 4, tree=nodes)
        last_hidden_states(model, micro, torch.device("cpu"))
    assert calls == [(1, 40, 64), (6, 10, 16), (1, 50, 64), (1, 40, 64), (2, 50, 64)]


def test_published_windows_are_probed_by_short_ones_and_restored() -> None:
    model = places_model("Mistral", sliding_window=4096)
    prepare_for_trees(model)
    assert model.config.sliding_window == 4096
    chunked = places_model("Llama4Text", attention_chunk_size=8192)
    prepare_for_trees(chunked)
    assert chunked.config.attention_chunk_size == 8192
    gemma = places_model("Gemma3Text", sliding_window=4096)
    prepare_for_trees(gemma)
    assert [layer.self_attn.sliding_window for layer in gemma.layers] == [4096, None] * 2


def test_windows_that_a_pass_does_not_read_are_not_probed_by_short_ones() -> None:
    model = places_model("Gemma3Text", layer_types=["full_attention"] * 4, sliding_window=4096)
    with pytest.raises(ValueError, match="its setting sliding_window=4096 may limit"):
        prepare_for_trees(model)


@pytest.mark.spec("tree.unsupported-models")
def test_layers_that_select_blocks_are_refused_beside_layers_with_a_state() -> None:
    # 4 nodes in a block, of which more than the probe's rows have are selected
    model = random_model("qwen4_exp_text").base_model
    model.config.indexer_budget = 2048
    with pytest.raises(ValueError, match="it has layers of indexed_attention"):
        prepare_for_trees(model)


@pytest.mark.spec("tree.unsupported-models")
def test_queries_scaled_by_their_place_in_a_pass_are_refused() -> None:
    model = places_model("Llama4Text", attn_temperature_tuning=True)
    with pytest.raises(ValueError, match="scaled by their place in a pass"):
        prepare_for_trees(model)


def test_options_of_the_attention_function_that_change_nothing_are_accepted() -> None:
    batch = agent_batch(0)
    model = tiny("Llama")
    for layer in model.model.layers:
        layer.self_attn.forward = partial(layer.self_attn.forward, sinks=None, is_causal=True)
    policy = Policy(model, tree=True)
    wanted = Policy(tiny("Llama"), max_tokens_per_microbatch=1).batch_logprobs(batch)
    torch.testing.assert_close(policy.batch_logprobs(batch), wanted, atol=1e-5, rtol=0)  # float32
    layer.self_attn.forward = partial(layer.self_attn.forward, temperature=2.0)
    with pytest.raises(ValueError, match="the attention option temperature is not supported"):
        policy.batch_logprobs(batch)
    layer.self_attn.forward = partial(layer.self_attn.forward, temperature=None, is_causal=False)
    with pytest.raises(ValueError, match="wanted causal attention"):
        policy.batch_logprobs(batch)


def test_the_probe_compares_with_the_attention_of_the_model() -> None:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def halved(*args: Any, **options: Any) -> Any:
        out, weights = sdpa_attention_forward(*args, **options)
        return out / 2, weights

    AttentionInterface.register("halved", halved)
    model = tiny("Llama", torch.float32)
    model.set_attn_implementation("halved")
    with pytest.raises(ValueError, match="not those of the rows"):
        Policy(model, tree=True)


@pytest.mark.usefixtures("independent")
def test_attention_output_is_contiguous() -> None:
    def jetmoe() -> Any:  # calls view on the output
        sizes = {"kv_channels": 8, "num_key_value_heads": 2, "num_local_experts": 2}
        return wide(model_of("JetMoe", **sizes))

    batch = agent_batch(1)
    _, wanted = gradients(jetmoe(), batch, max_tokens_per_microbatch=1)
    _, got = gradients(jetmoe(), batch, tree=True)
    assert_same_gradients(wanted, got, 1e-3)  # experts do not support float64


@pytest.mark.parametrize("tree", [False, True])
def test_output_without_last_hidden_state_is_refused(tree: bool) -> None:
    model = tiny_model()
    model.model.forward = lambda *_, **__: SimpleNamespace(logits=torch.zeros(1, 8, 16))
    with pytest.raises(ValueError, match="has no last_hidden_state"):
        Policy(model, tree=tree)
    with pytest.raises(ValueError, match=r"cannot be trained as trees.*no last_hidden_state"):
        prepare_for_trees(model.model)


def test_model_with_different_results_on_trees_is_refused() -> None:
    model = tiny_model()
    forward = model.model.forward

    def deaf(*args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)  # like a model that computes positions itself

    model.model.forward = deaf
    with pytest.raises(ValueError, match="not those of the rows"):
        Policy(model, tree=True)


def test_dropout_is_refused() -> None:
    policy = Policy(tiny_model(), tree=True)
    for layer in policy.model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    policy.model.train()
    (micro,) = plan_micro_batches(agent_batch(0), 10_000, tree=True)
    with pytest.raises(ValueError, match="dropout: expected 0"):
        policy.logprobs(micro)

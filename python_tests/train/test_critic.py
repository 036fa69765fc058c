"""The critic: values before each token, the clipped loss, checkpoints; docs/spec.md section 9."""

from pathlib import Path

import pytest
import torch
from _fakes import tiny_model

from skyrl_fast.batch import StepBatch
from skyrl_fast.config import OptimizerConfig
from skyrl_fast.train.model.critic import (
    Critic,
    ValueModel,
    explained_variance,
    load_value_model,
    value_loss,
)

CPU = torch.device("cpu")


def make_batch(prompts: int = 4) -> StepBatch:
    """Return two trajectories of two steps per prompt; the last token is not trained."""
    generator = torch.Generator().manual_seed(5)
    output: dict = {"trajectory_ids": [], "is_last_step": []}
    for name in ("prompt_token_ids", "response_ids", "loss_masks", "rewards"):
        output[name] = []
    for prompt in range(prompts):
        for sample in range(2):
            context = [1, 4 + prompt]
            for step in range(2):
                length = int(torch.randint(2, 5, (1,), generator=generator))
                tokens = torch.randint(4, 16, (length,), generator=generator).tolist()
                output["prompt_token_ids"].append(list(context))
                output["response_ids"].append(tokens)
                output["loss_masks"].append([1] * (length - 1) + [0])
                output["rewards"].append(float(tokens[0] > 9))
                output["trajectory_ids"].append((str(prompt), sample))
                output["is_last_step"].append(step == 1)
                context = [*context, *tokens, 3]
    batch = StepBatch.from_generator_output(output)
    old = torch.randn(batch.loss_mask.shape, generator=generator)
    return batch.with_(values=old, returns=torch.randn(batch.loss_mask.shape, generator=generator))


def make_critic(model: ValueModel | None = None, **options: object) -> Critic:
    torch.manual_seed(0)
    config = OptimizerConfig(lr=options.pop("lr", 1e-2), weight_decay=0.0)  # type: ignore[arg-type]
    args: dict = {"total_steps": 100, "mini_batch_size": 2} | options
    return Critic(model or ValueModel(tiny_model().base_model), config, **args)


@pytest.mark.spec("advantage.critic-loss")
@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss", "held"),
    [
        (1.0, 0.0, 3.0, None, 2.0, False),
        (0.1, 0.0, 3.0, 0.2, 0.5 * 2.9**2, False),  # within the clip: the plain squared error
        (1.0, 0.0, 1.0, 0.5, 0.125, True),  # moved past the clip: only 0.5 of the way counts
        (1.0, 0.0, -1.0, 0.5, 2.0, False),  # moved the wrong way: the full error counts
    ],
)
def test_value_loss_by_hand(
    value: float, old: float, target: float, clip: float | None, loss: float, held: bool
) -> None:
    losses, clipped = value_loss(
        torch.tensor([value]), torch.tensor([old]), torch.tensor([target]), value_clip=clip
    )
    assert losses.tolist() == pytest.approx([loss])
    assert clipped.tolist() == [held]


@pytest.mark.spec("advantage.gae-values", "advantage.critic")
def test_values_are_predicted_from_the_state_before_each_token() -> None:
    critic, batch = make_critic(max_tokens_per_microbatch=40), make_batch()
    got = critic.batch_values(batch)
    for row in range(batch.num_rows):
        start, end = batch.cu_seqlens[row : row + 2].tolist()
        first, last = batch.cu_responses[row : row + 2].tolist()
        ids = batch.tokens[start:end].long()[None]
        with torch.no_grad():
            of_states = critic.model(ids)[0, end - start - (last - first) - 1 : -1]
        wanted = of_states * batch.loss_mask[first:last]
        torch.testing.assert_close(got[first:last], wanted, atol=1e-5, rtol=0)  # float32 noise


@pytest.mark.spec("advantage.critic-loss")
def test_gradient_does_not_depend_on_the_split() -> None:
    batch, gradients = make_batch(), []
    for budget in (1, 37, 10_000):
        critic = make_critic(max_tokens_per_microbatch=budget, mini_batch_size=4, value_clip=0.2)
        critic.optimizer.step = lambda: {}  # type: ignore[method-assign]
        metrics = critic.update(batch)
        gradients.append([p.grad for p in critic.model.parameters()])
        gradients[-1].append(torch.tensor(metrics["critic/critic_loss"]))
    for other in gradients[1:]:
        for one, two in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-4)  # order of float32 sums


def test_loss_is_the_mean_over_trained_tokens() -> None:
    critic, batch = make_critic(mini_batch_size=4), make_batch()
    now = critic.batch_values(batch)
    trained = batch.loss_mask != 0
    wanted = 0.5 * (now - batch.returns)[trained].square().mean()
    metrics = critic.update(batch)
    assert metrics["critic/critic_loss"] == pytest.approx(float(wanted), rel=1e-5)
    assert metrics["critic/values_mean"] == pytest.approx(float(now[trained].mean()), rel=1e-4)
    assert metrics["critic/optimizer_steps"] == 1
    assert metrics["critic/grad_norm"] > 0


@pytest.mark.spec("advantage.critic-tokens")
def test_tokens_of_the_environment_are_not_the_critics() -> None:
    plain = make_batch()
    observed = plain.with_(cross_entropy_weights=(plain.loss_mask == 0).float())
    got = []
    for batch in (plain, observed):
        critic = make_critic(mini_batch_size=4)
        values = critic.batch_values(batch)
        got.append((values, critic.update(batch), critic.batch_values(plain)))
    assert torch.equal(got[0][0], got[1][0]) and torch.equal(got[0][2], got[1][2])
    assert got[0][1] == got[1][1]


def test_batch_without_trained_tokens_changes_nothing() -> None:
    critic, batch = make_critic(), make_batch()
    before = [p.clone() for p in critic.model.parameters()]
    critic.update(batch.with_(loss_mask=torch.zeros_like(batch.loss_mask)))
    for one, two in zip(before, critic.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_causal_lm_provides_the_backbone_with_a_new_head(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    loaded = load_value_model(str(tmp_path), device=CPU)
    ids = torch.tensor([[1, 5, 7]])
    torch.testing.assert_close(
        loaded.backbone(ids).last_hidden_state, model.base_model(ids).last_hidden_state
    )
    assert loaded.value_head.weight.shape == (1, 16)
    assert not any("lm_head" in name for name, _ in loaded.named_parameters())
    with pytest.raises(ValueError, match=r"trainer\.critic\.model\.path: model folder not found"):
        load_value_model("./nowhere", device=CPU)


def test_explained_variance() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(torch.zeros(3), returns) == 0.0
    assert explained_variance(returns, torch.ones(3)) == 0.0


def test_values_inside_the_range_are_not_clipped() -> None:
    """Old value plus difference is not the value, in float32."""
    generator = torch.Generator().manual_seed(0)
    old = torch.full((1000,), -0.15)
    values = 0.01 * torch.randn(1000, generator=generator)
    returns = torch.randn(1000, generator=generator)
    _, is_active = value_loss(values, old, returns, value_clip=0.2)
    assert not is_active.any()

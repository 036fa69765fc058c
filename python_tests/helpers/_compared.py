"""A case: settings and scripted trajectories; the trainer's steps must equal the reference's."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from _driven import (
    DrivenStep,
    OptimizerStep,
    TrainedBatch,
    drive,
    prompts_of_run,
    uids_of_run,
)
from _fakes import tiny_model
from _scripted import LONGEST_ANSWER, World, fill_logprobs, random_samples, report_parts
from reference.losses import CustomLoss
from reference.metrics import mean, source_metrics, update_metrics
from reference.network import (
    Adapter,
    split_by_rows,
    token_distributions,
    token_values,
    vocabulary_logprobs,
)
from reference.rows import Row, Sample, parts_of_policy
from reference.step import (
    Prepared,
    complete_metrics,
    informative_uids,
    part_metrics,
    parts_of,
    prepare,
    sampling_metrics,
    sums_rewards,
)
from reference.update import (
    AdamW,
    Terms,
    critic_loss,
    explained_variance,
    gradients,
    is_clipped,
    learning_rate,
    loss_terms,
    mini_batches,
    norm_of,
    tokens_known_before,
    trained_places,
)

from skyrl_fast.config import Config

# The trainer computes in float32: seven digits, less what sums and exponentials lose.
ADVANTAGES = 5e-5  # divided by standard deviations of what is rounded
# Of rewards with a KL, whose rounding is that of log-probabilities: 3e-6, divided by the deviation
# of a group with equal outcomes, which is down to a hundredth.
ADVANTAGES_OF_KL = 5e-4
# Of advantages that are equal but for their rounding, divided by the deviation of a batch, whose
# least is a ten-thousandth. Of others the largest is above a half.
ADVANTAGES_OF_EQUALS = 5e-3
GRADIENTS = 2e-4  # of the largest element
# Of a difference of log-probabilities, which is their rounding where it is small itself.
DIFFERENCE = 5e-6
WEIGHTS = 1e-6
METRICS = 2e-4
CLIP_METRICS = {
    "policy/clip_ratio",
    "policy/clip_ratio_low",
    "policy/clip_ratio_high",
    "policy/chosen_ratio",
}


# Of the rows that all roles are trained on.
OF_ROLES = {
    "policy/summary_loss_share",
    "reward/num_groups_without_baseline",
    "reward/num_zero_variance_filtered",
}


@dataclass(slots=True)
class Difference:
    """Where the trainer and the reference differ."""

    what: str
    trainer: Any
    reference: Any

    def __str__(self) -> str:
        return f"{self.what}: trainer {self.trainer}, reference {self.reference}"


@dataclass(slots=True)
class Compared:
    """What was compared in a case."""

    differences: list[Difference] = field(default_factory=list)
    values: int = 0
    gradients: int = 0
    undecided: int = 0  # batches of a policy of which rounding decides what is chosen

    def close(self, what: str, trainer: Any, reference: Any, tolerance: float) -> None:
        self.values += 1
        one = torch.as_tensor(trainer, dtype=torch.float64).reshape(-1)
        other = torch.as_tensor(reference, dtype=torch.float64).reshape(-1)
        if one.shape != other.shape:
            self.differences.append(Difference(what, tuple(one.shape), tuple(other.shape)))
            return
        scale = max(1.0, float(other.abs().max()) if other.numel() else 0.0)
        if not torch.allclose(one, other, rtol=0, atol=tolerance * scale):
            at = int((one - other).abs().nan_to_num(math.inf).argmax())
            self.differences.append(Difference(f"{what}[{at}]", float(one[at]), float(other[at])))

    def same(self, what: str, trainer: Any, reference: Any) -> None:
        self.values += 1
        if trainer != reference:
            self.differences.append(Difference(what, trainer, reference))


@dataclass(frozen=True, slots=True)
class Folders:
    """Models on the disk."""

    policy: Path
    reference: Path
    critic: Path


def settings_of(folders: Folders, run_path: Path) -> dict[str, Any]:
    """Return the settings that all cases share: large steps, small batches, no output."""
    return {
        "data.train_data": ["given"],
        "generator.n_samples_per_prompt": 3,
        "generator.sampling_params.max_generate_length": LONGEST_ANSWER,
        "trainer.ckpt_interval": -1,
        "trainer.device": "cpu",
        "trainer.dump_trajectories": False,
        "trainer.eval_before_train": False,
        "trainer.plot": False,
        "trainer.policy.model.path": str(folders.policy),
        "trainer.policy.optimizer_config.lr": 0.01,
        "trainer.policy.optimizer_config.max_grad_norm": 0.1,
        "trainer.policy_mini_batch_size": 2,
        "trainer.run_path": str(run_path),
        "trainer.train_batch_size": 4,
    }


def world_of(config: Config) -> World:
    """Return a world whose trajectories the settings can train."""
    top_k = config.generator.sampling_params.top_k
    return World(
        policies=config.call_names,
        only_grows=config.trainer.rows == "trajectory",
        is_recorded=config.agent.is_set,
        num_kept=max(0, top_k),
        summarises=config.agent.is_set or config.generator.context == "compact",
    )


def write_models(folder: Path) -> Folders:
    """Write three models of other weights."""
    paths = Folders(folder / "policy", folder / "reference", folder / "critic")
    for seed, path in enumerate((paths.policy, paths.reference, paths.critic)):
        tiny_model(seed).save_pretrained(path)
    return paths


@cache
def _model_of(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path).double().eval()
    return model.requires_grad_(False)


def _weights_of(path: Path) -> dict[str, torch.Tensor]:
    return dict(_model_of(path).named_parameters())


def compare(
    config: Config,
    folders: Folders,
    rng: random.Random,
    *,
    num_prompts: int,
    custom: CustomLoss | None = None,
) -> Compared:
    """Run the trainer and the reference over the same random trajectories.

    Args:
        custom: the reference of a registered loss.
    """
    uids = uids_of_run(num_prompts)
    samples = random_samples(rng, world_of(config), uids, config.generator.n_samples_per_prompt)
    if config.trainer.algorithm.gdpo_weights:
        report_parts(rng, samples)
    temperature = config.generator.sampling_params.temperature
    fill_logprobs(rng, samples, lambda steps: _scores(steps, folders, temperature))
    by_uid = {uid: [one.trajectory for one in samples if one.trajectory.uid == uid] for uid in uids}
    sampled, steps = drive(config, by_uid)
    comparison = _Comparison(config, folders, samples, custom)
    comparison.compare_selection(sampled, steps)
    return comparison.of(steps)


def _scores(steps: Sequence[Any], folders: Folders, temperature: float) -> list[list[float]]:
    rows = [
        Row("", 0, prompt, response, [], [], [], "", kept=kept) for prompt, response, kept in steps
    ]
    if not rows:
        return []
    with torch.no_grad():
        logprobs, _ = token_distributions(
            _model_of(folders.policy), _weights_of(folders.policy), rows, temperature
        )
    return split_by_rows(logprobs, rows)


@dataclass(slots=True)
class Selection:
    """Prompts that are sampled for a step, and those that it trains; "" is a copy of another."""

    taken: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    num_informative: int = 0


class _Comparison:
    def __init__(
        self,
        config: Config,
        folders: Folders,
        samples: Sequence[Sample],
        custom: CustomLoss | None,
    ) -> None:
        self.config = config
        self.custom = custom
        self.algorithm = config.trainer.algorithm
        self.folders = folders
        self.samples = {(one.trajectory.uid, one.trajectory.repetition_id): one for one in samples}
        self.found = Compared()
        self.temperature = config.generator.sampling_params.temperature
        self.coefficients: dict[str | None, float] = {}
        self.optimizers: dict[str | None, AdamW] = {}
        self.critic_optimizer: AdamW | None = None
        prompts = {one.trajectory.uid for one in samples}
        self.total_batches = len(prompts) // config.trainer.train_batch_size
        own = prompts_of_run(len(prompts), sources=list(config.data.mixture))
        self.source_of_uid = {one.uid: one.data_source for one in own}

    def of(self, steps: Sequence[DrivenStep]) -> Compared:
        names = self.config.policies or (None,)
        for number, step in enumerate(steps):
            samples = [self._sample_of(one) for one in step.trajectories]
            trained = {one.policy: one for one in step.trained}
            if self.config.data.mixture:
                sums = sums_rewards(self.config)
                metrics = source_metrics(step.trajectories, sums_rewards=sums)
                weights = self.config.data.mixture
                shares = {f"data/{name}/weight": share for name, share in weights.items()}
                self._compare_metrics(f"step {number}", metrics | shares, step, prefix="")
            if self.config.call_names:
                metrics = complete_metrics(samples, self.config)
                self._compare_metrics(f"step {number}", metrics, step, prefix="")
            for name in names:
                self._compare_policy(f"step {number}", name, samples, trained.get(name), step)
        return self.found

    def compare_selection(self, sampled: Sequence[str], steps: Sequence[DrivenStep]) -> None:
        """Compare the prompts that are trained with those that dynamic sampling selects."""
        way = self.algorithm.dynamic_sampling.type
        size = self.config.trainer.train_batch_size
        waiting = list(sampled)
        if not steps:
            self.found.same("a step", False, len(self._select(waiting).kept) >= size)
        for number, step in enumerate(steps):
            trained = list(dict.fromkeys(one.uid for one in step.trajectories))
            selected = self._select(waiting)
            chosen = [uid if "+" not in uid else "" for uid in trained]
            self.found.same(f"step {number}: prompts", chosen, selected.kept[:size])
            copies = [uid.split("+")[0] for uid in trained if "+" in uid]
            self.found.same(f"step {number}: copies", set(copies) <= set(chosen), True)
            samples = [one for uid in selected.taken for one in self._group(uid)]
            metrics = sampling_metrics(samples, self.config)
            if way is not None:
                uninformative = len(selected.taken) - selected.num_informative
                metrics["dynamic_sampling/num_groups_sampled"] = float(len(selected.taken))
                metrics["dynamic_sampling/num_groups_uninformative"] = float(uninformative)
                metrics["dynamic_sampling/num_groups_replaced"] = float(len(copies))
            self._compare_metrics(f"step {number}", metrics, step, prefix="")

    def _select(self, waiting: list[str]) -> Selection:
        """Take the prompts of a step from those that wait."""
        settings = self.algorithm.dynamic_sampling
        size = self.config.trainer.train_batch_size
        selected = Selection()
        while len(selected.kept) < size and waiting:
            # At a time: a batch, or what is missing while others are generated.
            count = size - len(selected.kept) if self.config.max_staleness else size
            batch = waiting[:count]
            del waiting[:count]
            selected.taken += batch
            good = batch
            if settings.type is not None:
                good = informative_uids([self._group(uid) for uid in batch], self.config)
            selected.num_informative += len(good)
            if settings.type == "replace":
                if len(good) <= settings.min_replace_ratio * len(batch):
                    continue
                good = [uid if uid in good else "" for uid in batch]
            selected.kept += good
        return selected

    def _group(self, uid: str) -> list[Sample]:
        return [one for one in self.samples.values() if one.trajectory.uid == uid]

    def _sample_of(self, trajectory: Any) -> Sample:
        uid = trajectory.uid.split("+")[0].split("~")[0]
        one = self.samples[uid, trajectory.repetition_id]
        return Sample(trajectory, one.is_answer)

    # --- models -------------------------------------------------------------------------------

    def _full(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the weights of the policy's model, with the adapter merged in."""
        base = _weights_of(self.folders.policy)
        lora = self.config.trainer.policy.model.lora
        if lora.rank == 0:
            return {**base, **weights}
        return _adapter(weights, lora).added_to(base)

    def _per_token(self, path: Path, weights: Mapping[str, torch.Tensor]) -> Any:
        def of_rows(rows: Sequence[Row]) -> list[list[float]]:
            with torch.no_grad():
                logprobs, _ = token_distributions(_model_of(path), weights, rows, self.temperature)
            return split_by_rows(logprobs, rows)

        return of_rows

    def _values(self, rows: Sequence[Row], weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        lora = self.config.trainer.policy.model.lora
        critic = self.config.trainer.critic.model.path
        is_shared = lora.rank > 0 and critic == self.config.trainer.policy.model.path
        (head,) = [value for name, value in weights.items() if "value_head" in name]
        if is_shared:
            path = self.folders.policy
            adapter = {name: value for name, value in weights.items() if "lora" in name}
            full = _adapter(adapter, lora).added_to(_weights_of(path))
        else:
            path = Path(str(critic))
            full = {
                name.replace("backbone.", "model.", 1): value
                for name, value in weights.items()
                if "value_head" not in name
            }
        backbone = {
            name.removeprefix("model."): value
            for name, value in full.items()
            if name.startswith("model.")
        }
        return token_values(_model_of(path).model, backbone, head, rows)

    # --- a policy's part of a step ------------------------------------------------------------

    def _compare_policy(
        self,
        where: str,
        name: str | None,
        samples: Sequence[Sample],
        trained: TrainedBatch | None,
        step: DrivenStep,
    ) -> None:
        where = where if name is None else f"{where}, {name}"
        parts = parts_of(samples, self.config, name)
        self.found.same(f"{where}: is trained", trained is not None, bool(parts))
        if trained is None or not parts:
            return
        prepared = self._prepare(parts, name, trained)
        self._compare_rows(where, prepared, trained)
        terms, norms, rates = self._compare_update(where, name, prepared, trained)
        metrics = dict(prepared.metrics)
        if self.config.roles:
            self._compare_roles(where, samples, step)
            # Others without a role's name are of the complete trajectories.
            metrics = {key: metrics[key] for key in OF_ROLES & metrics.keys()}
        is_decided = all(one.is_decided for one in terms) and _have_same_signs(prepared, trained)
        if terms and is_decided:
            corrects = self.algorithm.off_policy_correction.enabled
            epochs = self.config.trainer.update_epochs_per_batch
            metrics |= update_metrics(
                terms,
                norms,
                rates,
                corrects=corrects,
                known_before=tokens_known_before(self.algorithm, epochs),
                epochs=epochs,
            )
        self.found.undecided += not is_decided
        if self.custom is not None:  # it has its own metrics in place of these
            for key in CLIP_METRICS & metrics.keys():
                del metrics[key]
        if prepared.kl is not None:
            metrics["loss/avg_kl"] = prepared.kl.mean
            metrics["loss/avg_kl_max"] = prepared.kl.largest
            metrics["loss/kl_loss_coef"] = self.coefficients[name]
            self.coefficients[name] = prepared.kl.next_coefficient
        if self.config.trainer.critic.model.path is not None:
            metrics |= self._compare_critic(where, prepared, trained)
        self._compare_metrics(where, metrics, step, prefix="" if name is None else f"{name}/")

    def _compare_roles(self, where: str, samples: Sequence[Sample], step: DrivenStep) -> None:
        """Compare the outcomes of each role alone."""
        sums = sums_rewards(self.config)
        for role in self.config.roles:
            parts = parts_of_policy(samples, role, sums_rewards=sums)
            if parts:
                metrics = part_metrics(parts, self.config)
                self._compare_metrics(where, metrics, step, prefix=f"{role}/")

    def _compare_metrics(
        self, where: str, metrics: Mapping[str, float], step: DrivenStep, *, prefix: str
    ) -> None:
        for key, value in metrics.items():
            reported = step.metrics.get(prefix + key)
            if reported is None:
                self.found.same(f"{where}: {key}", None, value)
            else:
                self.found.close(f"{where}: {key}", reported, value, METRICS)

    def _prepare(self, parts: Any, name: str | None, trained: TrainedBatch) -> Prepared:
        algorithm = self.algorithm
        path = self.folders.policy
        reference = None
        if algorithm.use_kl_loss or algorithm.use_kl_in_reward:
            frozen = Path(self.config.trainer.ref.model.path or path)
            reference = self._per_token(frozen, _weights_of(frozen))
        teacher = None
        if algorithm.distillation.teachers:
            teacher = self._teacher_of_rows
        values = None
        if self.config.trainer.critic.model.path is not None:

            def values(rows: Sequence[Row]) -> list[list[float]]:
                with torch.no_grad():
                    found = self._values(rows, trained.critic_weights)
                return split_by_rows(found, rows)

        return prepare(
            parts,
            self.config,
            old=self._per_token(path, self._full(trained.weights)),
            reference=reference,
            teacher=teacher,
            values=values,
            coefficient=self.coefficients.setdefault(name, algorithm.kl_loss_coef),
        )

    def _teacher_of_rows(self, rows: Sequence[Row]) -> list[torch.Tensor | None]:
        """Return log-probabilities by the teacher of each row's source, at temperature 1."""
        teachers = self.config.trainer.algorithm.distillation.teachers
        found: list[torch.Tensor | None] = []
        for row in rows:
            source = self.source_of_uid[row.uid.split("/")[0].split("+")[0].split("~")[0]]
            path = teachers.get(source or "default", teachers.get("default"))
            if path is None:
                found.append(None)
                continue
            model = _model_of(Path(path))
            weights = _weights_of(Path(path))
            with torch.no_grad():
                found.append(vocabulary_logprobs(model, weights, [row], 1.0))
        return found

    def _compare_rows(self, where: str, prepared: Prepared, trained: TrainedBatch) -> None:
        batch = trained.batch
        rows = prepared.batch.rows
        found = self.found
        found.same(f"{where}: rows", batch.num_rows, len(rows))
        if batch.num_rows != len(rows):
            return
        lengths = batch.lengths.tolist()
        responses = batch.response_lengths.tolist()
        tokens = [part.tolist() for part in batch.tokens.split(lengths)]
        masks = [part.tolist() for part in batch.loss_mask.split(responses)]
        sampled = [part.tolist() for part in batch.rollout_logprobs.split(responses)]
        advantages = [part.tolist() for part in batch.advantages.split(responses)]
        if self.algorithm.advantage_batch_normalize and _largest_trained(prepared) < 0.5:
            tolerance = ADVANTAGES_OF_EQUALS
        elif self.algorithm.use_kl_in_reward:
            tolerance = ADVANTAGES_OF_KL
        else:
            tolerance = ADVANTAGES
        for number, row in enumerate(rows):
            of_row = f"{where}, row {number}"
            found.same(f"{of_row}: tokens", tokens[number], row.tokens)
            found.same(f"{of_row}: prompt", lengths[number] - responses[number], len(row.prompt))
            found.same(f"{of_row}: mask", masks[number], row.mask)
            found.same(f"{of_row}: uid", batch.row_uids[number], row.uid)
            found.same(f"{of_row}: last", bool(batch.is_last_step[number]), row.is_last)
            found.close(f"{of_row}: sampled", sampled[number], row.sampled, ADVANTAGES)
            own = [
                value
                for value, trained in zip(advantages[number], row.mask, strict=True)
                if trained
            ]
            expected = [
                value
                for value, trained in zip(
                    prepared.batch.advantages.values[number], row.mask, strict=True
                )
                if trained
            ]
            found.close(f"{of_row}: advantages", own, expected, tolerance)
        if batch.returns is not None:
            own = batch.returns[batch.loss_mask != 0]
            returns = [
                value
                for row, of_row in zip(rows, prepared.batch.advantages.returns, strict=True)
                for value, trained in zip(of_row, row.mask, strict=True)
                if trained
            ]
            found.close(f"{where}: returns", own, returns, ADVANTAGES)
        if self.algorithm.observation_loss_coef > 0:
            weights = [part.tolist() for part in batch.cross_entropy_weights.split(responses)]
            for number, row in enumerate(rows):
                found.same(f"{where}, row {number}: observed", weights[number], row.is_observed)
        if prepared.batch.values is not None:
            self._compare_values(where, prepared, trained)

    def _compare_values(self, where: str, prepared: Prepared, trained: TrainedBatch) -> None:
        rows = prepared.batch.rows
        known = trained.batch.values.split(trained.batch.response_lengths.tolist())
        places = trained_places(rows, range(len(rows)))
        one = [float(known[row][token]) for row, token in places]
        other = [prepared.batch.values[row][token] for row, token in places]
        self.found.close(f"{where}: values", one, other, ADVANTAGES)

    def _compare_update(
        self, where: str, name: str | None, prepared: Prepared, trained: TrainedBatch
    ) -> tuple[list[Terms], list[float], list[float]]:
        trainer = self.config.trainer
        rows = prepared.batch.rows
        groups_per_prompt = len({row.uid.partition("/")[2] for row in rows})  # by role
        minis = mini_batches(rows, trainer.policy_mini_batch_size * groups_per_prompt)
        minis = minis * trainer.update_epochs_per_batch
        self.found.same(f"{where}: optimizer steps", len(trained.steps), len(minis))
        settings = trainer.policy.optimizer_config
        steps_per_batch = trainer.train_batch_size // trainer.policy_mini_batch_size
        steps_per_batch *= trainer.update_epochs_per_batch
        total = steps_per_batch * self.total_batches
        optimizer = self.optimizers.setdefault(name, AdamW(settings, total))
        all_terms = []
        norms = []
        rates = []
        for number, (mini, step) in enumerate(zip(minis, trained.steps, strict=False)):
            weights = {key: value.clone().requires_grad_() for key, value in step.before.items()}
            full = self._full(weights)

            def distributions(chosen: Sequence[Row], full: Any = full) -> Any:
                model = _model_of(self.folders.policy)
                return token_distributions(model, full, chosen, self.temperature)

            def vocabulary(chosen: Sequence[Row], full: Any = full) -> Any:
                model = _model_of(self.folders.policy)
                return vocabulary_logprobs(model, full, chosen, self.temperature)

            terms = loss_terms(
                prepared.batch, mini, distributions, self.config, self.custom,
                is_before_any_step=number == 0, vocabulary=vocabulary,
            )  # fmt: skip
            gradient = gradients(terms.loss, weights)
            if not terms.is_decided:  # the trainer may have chosen other tokens
                gradient |= step.gradient
            all_terms.append(terms)
            norms.append(norm_of(gradient))
            rates.append(learning_rate(optimizer.steps, settings, total))
            self._compare_step(f"{where}, update {number}", gradient, step, optimizer)
        return all_terms, norms, rates

    def _compare_step(
        self,
        where: str,
        gradient: Mapping[str, torch.Tensor],
        step: OptimizerStep,
        optimizer: AdamW,
    ) -> None:
        """Compare the gradients, then the weights after a step with the trainer's gradients."""
        found = self.found
        largest = max(float(value.abs().max()) for value in gradient.values())
        for key, expected in gradient.items():
            own = step.gradient.get(key, torch.zeros_like(expected))
            found.gradients += 1
            # Relative to the largest element of all: sums of terms that cancel are rounded.
            error = float((own - expected).abs().max())
            if not error <= max(GRADIENTS * largest, DIFFERENCE):
                found.differences.append(
                    Difference(
                        f"{where}: gradient of {key}",
                        float(own.norm()),
                        f"{float(expected.norm())} (off by {error:.2e} of {largest:.2e})",
                    )
                )
        after = optimizer.step(step.before, step.gradient)
        for key, expected in after.items():
            found.close(f"{where}: weight {key}", step.after[key], expected, WEIGHTS)

    def _compare_critic(
        self, where: str, prepared: Prepared, trained: TrainedBatch
    ) -> dict[str, float]:
        trainer = self.config.trainer
        rows = prepared.batch.rows
        batch = prepared.batch
        assert batch.values is not None
        size = trainer.critic_mini_batch_size or trainer.policy_mini_batch_size
        minis = mini_batches(rows, size) * trainer.update_epochs_per_batch
        settings = trainer.critic.optimizer_config
        total = len(minis) * self.total_batches
        if self.critic_optimizer is None:
            self.critic_optimizer = AdamW(settings, total)
        self.found.same(f"{where}: critic steps", len(trained.critic_steps), len(minis))
        losses = []
        norms = []
        values_seen = []
        clipped = []
        for number, (mini, step) in enumerate(zip(minis, trained.critic_steps, strict=False)):
            weights = {key: value.clone().requires_grad_() for key, value in step.before.items()}
            places = trained_places(rows, mini)
            loss = None
            if places:
                chosen = sorted({row for row, _ in places})
                predicted = self._values([rows[row] for row in chosen], weights)
                by_row = dict(
                    zip(
                        chosen,
                        predicted.split([len(rows[row].response) for row in chosen]),
                        strict=True,
                    )
                )
                current = torch.stack([by_row[row][token] for row, token in places])
                old = [batch.values[row][token] for row, token in places]
                returns = [batch.advantages.returns[row][token] for row, token in places]
                clip = trainer.algorithm.value_clip
                loss = critic_loss(current, old, returns, clip)
                values_seen += current.tolist()
                if clip is not None:
                    clipped += [
                        float(is_clipped(one, before, target, clip))
                        for one, before, target in zip(current.tolist(), old, returns, strict=True)
                    ]
            losses.append(0.0 if loss is None else loss.item())
            gradient = gradients(loss, weights)
            norms.append(norm_of(gradient))
            self._compare_step(f"{where}, critic {number}", gradient, step, self.critic_optimizer)
        metrics = {
            "critic/critic_loss": sum(losses) / len(losses),
            "critic/grad_norm": sum(norms) / len(norms),
            "critic/optimizer_steps": float(len(minis)),
        }
        if values_seen:
            metrics["critic/values_mean"] = mean(values_seen)
            metrics["critic/values_clipfrac"] = mean(clipped)
            metrics["critic/explained_variance"] = explained_variance(prepared.batch)
        return metrics


def _largest_trained(prepared: Prepared) -> float:
    """Return the largest absolute advantage of a trained token; 0 without one."""
    largest = 0.0
    for row, values in zip(prepared.batch.rows, prepared.batch.advantages.values, strict=True):
        for value, is_trained in zip(values, row.mask, strict=True):
            if is_trained:
                largest = max(largest, abs(value))
    return largest


def _have_same_signs(prepared: Prepared, trained: TrainedBatch) -> bool:
    """Return whether advantages have the same signs: rounding decides that of one near 0.

    Whether a row has a gradient hangs on it, and which ratios are clipped.
    """
    batch = trained.batch
    signs = torch.sign(batch.advantages).masked_fill(batch.loss_mask == 0, 0.0)
    own = [part.tolist() for part in signs.split(batch.response_lengths.tolist())]
    pairs = zip(prepared.batch.rows, prepared.batch.advantages.values, strict=True)
    expected = [
        [
            _sign(value) if is_trained else 0.0
            for value, is_trained in zip(values, row.mask, strict=True)
        ]
        for row, values in pairs
    ]
    return own == expected


def _sign(value: float) -> float:
    return float(value > 0) - float(value < 0)


def _adapter(weights: Mapping[str, torch.Tensor], lora: Any) -> Adapter:
    scale = lora.alpha / (math.sqrt(lora.rank) if lora.use_rslora else lora.rank)
    a = {}
    b = {}
    for name, value in weights.items():
        module, _, rest = name.partition(".lora_")
        into = a if rest.startswith("A") else b
        into[f"{module}.weight"] = value
    return Adapter(a, b, scale)

"""What SkyRL does from a generator output to a batch with advantages: its own code, or restated.

`SkyRL` calls the functions of an installed `skyrl` package. `Restated` does the same work in the
same steps for machines without it, except that rows are padded by NumPy slice assignment, which is
several times faster than the lists of padded lists that skyrl 0.3.0 passes to torch.tensor: the
stronger baseline. Where both can run, their results are compared.
"""

from __future__ import annotations

import contextlib
import copy
import math
import typing
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

EPSILON = 1e-6


def load_skyrl(samples_per_prompt: int, pad_token_id: int, dp_size: int) -> SkyRL | None:
    """Return SkyRL's own pipeline, or None where the package cannot be imported."""
    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict  # SkyRL needs it on Python 3.11
    try:
        return SkyRL(samples_per_prompt, pad_token_id, dp_size)
    except ImportError:
        return None


class SkyRL:
    """The methods of SkyRL's trainer, called on a stub with only the attributes they read."""

    name = "skyrl"

    def __init__(self, samples_per_prompt: int, pad_token_id: int, dp_size: int) -> None:
        from loguru import logger
        from skyrl.train.generators.base import TrajectoryID
        from skyrl.train.trainer import RayPPOTrainer
        from skyrl.train.utils.trainer_utils import validate_generator_output

        logger.disable("skyrl")
        self.trajectory_id = TrajectoryID
        self.trainer = RayPPOTrainer
        self.validate = validate_generator_output
        self.samples_per_prompt = samples_per_prompt
        self.pad_token_id = pad_token_id
        self.dp_size = dp_size

    def _stand_in(self, num_prompts: int) -> Any:
        algorithm = SimpleNamespace(
            zero_variance_filter=False,
            max_seq_len=None,
            off_policy_correction=SimpleNamespace(tis_ratio_type=None, sequence_mask_metric=None),
            advantage_estimator="grpo",
            gamma=1.0,
            lambd=1.0,
            grpo_norm_by_std=True,
        )
        generator = SimpleNamespace(
            step_wise_trajectories=True,
            merge_stepwise_output=False,
            n_samples_per_prompt=self.samples_per_prompt,
        )
        trainer = SimpleNamespace(
            algorithm=algorithm,
            train_batch_size=num_prompts,
            policy_mini_batch_size=num_prompts,
            critic=SimpleNamespace(model=SimpleNamespace(path=None)),
        )
        return SimpleNamespace(
            cfg=SimpleNamespace(generator=generator, trainer=trainer),
            all_metrics={},
            tokenizer=SimpleNamespace(pad_token_id=self.pad_token_id),
            dispatch=SimpleNamespace(get_lcm_dp_size=lambda: self.dp_size),
        )

    def prepare(self, output: dict[str, Any]) -> dict[str, Any]:
        """Return the output with SkyRL's own id type; not timed."""
        ids = [self.trajectory_id(*pair) for pair in output["trajectory_ids"]]
        rows = {key: value for key, value in output.items() if key != "uids"}
        return {**rows, "trajectory_ids": ids}

    def run(self, output: dict[str, Any], uids: list[str]) -> dict[str, Any]:
        """Return the tensors that training reads, and the mean reward; timed."""
        stand_in = self._stand_in(len(set(uids)))
        output = dict(output)
        self.validate(len(uids), output, step_wise=True)
        output, uids = self.trainer.postprocess_generator_output(stand_in, output, uids)
        batch = self.trainer.convert_to_training_input(stand_in, output, uids)
        batch["values"] = None
        batch = self.trainer.compute_advantages_and_returns(stand_in, batch)
        return {
            "sequences": batch["sequences"],
            "loss_mask": batch["loss_mask"],
            "advantages": batch["advantages"],
            "reward": stand_in.all_metrics["reward/avg_raw_reward"],
        }


class Restated:
    """The same work, restated, with rows padded by NumPy."""

    name = "skyrl_numpy"

    def __init__(self, samples_per_prompt: int, pad_token_id: int, dp_size: int) -> None:
        self.samples_per_prompt = samples_per_prompt
        self.pad_token_id = pad_token_id
        self.dp_size = dp_size

    def prepare(self, output: dict[str, Any]) -> dict[str, Any]:
        """Return the output without what SkyRL passes next to it."""
        return {key: value for key, value in output.items() if key != "uids"}

    def run(self, output: dict[str, Any], uids: list[str]) -> dict[str, Any]:
        """Return the tensors that training reads, and the mean reward; timed."""
        _validate(output)
        reward = _reward_metrics(output, uids)
        tensors = self._tensors(output)
        self._mini_batch_bounds(uids)
        pad_size = math.ceil(len(uids) / self.dp_size) * self.dp_size - len(uids)
        last = list(output["is_last_step"])
        if pad_size:
            tensors = _with_padding_rows(tensors, pad_size)
            uids = copy.copy(uids) + [f"pad{i}" for i in range(pad_size)]
            last = last + [True] * pad_size
        advantages = _grpo(tensors, uids, last)
        real = len(uids) - pad_size
        tensors["rewards"].sum(-1)[:real][torch.tensor(last[:real])].mean().item()
        valid = torch.masked_select(advantages[:real], tensors["response_mask"][:real].bool())
        valid.mean().item(), valid.abs().mean().item()
        return {
            "sequences": tensors["sequences"],
            "loss_mask": tensors["loss_mask"],
            "advantages": advantages,
            "reward": reward,
        }

    def _tensors(self, output: dict[str, Any]) -> dict[str, torch.Tensor]:
        prompts, responses = output["prompt_token_ids"], output["response_ids"]
        total = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
        width = max(len(r) for r in responses)
        rows = len(prompts)
        sequences = np.full((rows, total), self.pad_token_id, dtype=np.int64)
        attention = np.zeros((rows, total), dtype=np.int64)
        response_mask = np.zeros((rows, width), dtype=np.int64)
        for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            start = total - len(prompt) - len(response)
            sequences[i, start : start + len(prompt)] = prompt
            sequences[i, total - len(response) :] = response
            attention[i, start:] = 1
            response_mask[i, width - len(response) :] = 1
        tensors = {
            "sequences": torch.from_numpy(sequences),
            "attention_mask": torch.from_numpy(attention),
            "response_mask": torch.from_numpy(response_mask),
        }
        right_aligned = {
            "loss_mask": output["loss_masks"],
            "rewards": output["rewards"],
            "rollout_logprobs": output["rollout_logprobs"],
        }
        for name, values in right_aligned.items():
            aligned = np.zeros((rows, width), dtype=np.float32)
            for i, row in enumerate(values):
                aligned[i, width - len(row) :] = row
            tensors[name] = torch.from_numpy(aligned)
        return tensors

    def _mini_batch_bounds(self, uids: list[str]) -> list[int]:
        seen, ends = {uids[0]}, []
        for i in range(1, len(uids)):
            if uids[i] != uids[i - 1]:
                assert uids[i] not in seen
                seen.add(uids[i])
                ends.append(i)
        return [*ends, len(uids)]


def _validate(output: dict[str, Any]) -> None:
    num_rows = len(output["response_ids"])
    for value in output.values():
        assert not isinstance(value, list) or len(value) == num_rows
    for i, response in enumerate(output["response_ids"]):
        assert len(response) == len(output["loss_masks"][i])
        assert len(response) == len(output["rewards"][i])
        assert len(response) == len(output["rollout_logprobs"][i])
    assert np.concatenate(output["loss_masks"]).sum() > 0
    assert all(isinstance(reward, list) for reward in output["rewards"])
    ids, last = [str(pair) for pair in output["trajectory_ids"]], output["is_last_step"]
    seen: set[str] = set()
    for i, identity in enumerate(ids):
        if i == 0 or identity != ids[i - 1]:
            assert identity not in seen
            seen.add(identity)
        if i + 1 < num_rows:
            assert (identity != ids[i + 1]) is last[i]
    assert last[-1] is True


def _reward_metrics(output: dict[str, Any], uids: list[str]) -> float:
    finals = {
        key: [value[i] for i in range(len(value)) if output["is_last_step"][i]]
        for key, value in output.items()
        if isinstance(value, list)
    }
    names = [uid for uid, last in zip(uids, output["is_last_step"], strict=True) if last]
    rewards = finals["rewards"]
    mean = float(np.mean([sum(row) for row in rewards]))
    np.mean([sum(max(r, 0) for r in row) for row in rewards])
    by_uid = defaultdict(list)
    for name, row in zip(names, rewards, strict=True):
        by_uid[name].append(row[-1])
    assert sum(any(r > 0 for r in group) for group in by_uid.values()) <= len(by_uid)
    return mean


def _with_padding_rows(tensors: dict[str, torch.Tensor], pad_size: int) -> dict[str, torch.Tensor]:
    padded = {}
    for name, tensor in tensors.items():
        rows = tensor[[0] * pad_size].clone()
        padded[name] = torch.cat([tensor, rows.zero_() if name == "loss_mask" else rows])
    return padded


def _grpo(tensors: dict[str, torch.Tensor], uids: list[str], last: list[bool]) -> torch.Tensor:
    is_last = torch.tensor(last)
    index = np.array(uids)[is_last.numpy()]
    scores = tensors["rewards"][is_last].sum(-1)
    members = defaultdict(list)
    for i in range(len(scores)):
        members[index[i]].append(scores[i])
    mean, std = {}, {}
    for name, group in members.items():
        alone = len(group) == 1
        mean[name] = torch.tensor(0.0) if alone else torch.mean(torch.tensor(group))
        std[name] = torch.tensor(1.0) if alone else torch.std(torch.tensor(group))
    for i in range(len(scores)):
        scores[i] = (scores[i] - mean[index[i]]) / (std[index[i]] + EPSILON)
    spread = scores[:, None] * torch.ones_like(tensors["response_mask"][is_last], dtype=torch.float)
    shifted = torch.cat([torch.tensor([False]), is_last[:-1]])
    trajectory = shifted.int().cumsum(0)
    mask = tensors["response_mask"].float()
    advantages, _returns = spread[trajectory] * mask, spread[trajectory] * mask
    return advantages


@contextlib.contextmanager
def warm_pages() -> Iterator[None]:
    """Keep freed memory mapped and switch the garbage collector off: SkyRL's best case."""
    import ctypes
    import gc

    trim_threshold, mmap_max = -1, -4  # glibc's M_TRIM_THRESHOLD and M_MMAP_MAX
    libc = ctypes.CDLL(None)
    libc.mallopt(mmap_max, 0)
    libc.mallopt(trim_threshold, -1)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        libc.mallopt(mmap_max, 65536)
        libc.mallopt(trim_threshold, 128 << 10)
        libc.malloc_trim(0)

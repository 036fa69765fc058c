"""Check that the default tests notice faults: break a kernel or a rule, and the tests must fail.

    python3 scripts/mutation_check.py --venv .venv [--only tree]

Each fault is one line of a copy of the sources in build/mutations, tried with the default tests of
the folders and files named with it, which pass without it. Exit code 1: the tests passed although
something was broken.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from source_copy import ROOT, copy_sources

TREE = ROOT / "build" / "mutations"
COPIED = ("csrc", "skyrl_fast", "python_tests", "bench", "docs", "examples", "scripts")
FILES = (
    "CMakeLists.txt",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "Makefile",
    "README.md",
    "pyproject.toml",
)


@dataclass(frozen=True, slots=True)
class Fault:
    """A line that is replaced.

    Args:
        what: the fault in words.
        path: of the file.
        right, wrong: the text, which occurs once, and what replaces it.
        tests: folders, files or tests (`file::test`) of python_tests that must notice.
    """

    what: str
    path: str
    right: str
    wrong: str
    tests: tuple[str, ...]


FAULTS = (
    Fault(
        "a fork starts from no state",
        "skyrl_fast/train/model/tree_states.py",
        "torch.stack(above) if above else above_roots",
        "torch.zeros_like(torch.stack(above)) if above else above_roots",
        ("train/test_tree_training.py",),
    ),
    Fault(
        "a child's gradient does not reach the state of its parent",
        "skyrl_fast/train/model/tree_states.py",
        "torch.stack(above) if above else above_roots",
        "torch.stack(above).detach() if above else above_roots",
        ("train/test_tree_training.py",),
    ),
    Fault(
        "a segment's convolution does not see the path above",
        "skyrl_fast/train/model/tree_states.py",
        "                tails[:, column] = above",
        "                tails[:, column] = -1",
        ("train/test_tree_training.py",),
    ),
    Fault(
        "padding changes the state that children start from",
        "skyrl_fast/train/model/tree_states.py",
        "pads_parents=limits is None or limits[0] <= 0",
        "pads_parents=True",
        ("train/test_tree_training.py",),
    ),
    Fault(
        "a rank gets the rows of its neighbour",
        "skyrl_fast/train/parallel/rank_shares.py",
        "Share.of(dealt[number])",
        "Share.of(dealt[number - 1])",
        ("train/test_rank_shares.py",),
    ),
    Fault(
        "all ranks get the rows of the first of them",
        "skyrl_fast/train/parallel/ranks.py",
        "if data is None or place == 0:",
        "if data is None:",
        ("train/test_ranks.py",),
    ),
    Fault(
        "a rank gets the passes of its rows without the rows",
        "skyrl_fast/train/model/micro_batch.py",
        "batch = self._batch.rows(numbers)",
        "batch = self._batch.rows(torch.arange(len(numbers)))",
        ("train/test_rank_shares.py",),
    ),
    Fault(
        "a rank's results are those of other rows",
        "skyrl_fast/train/parallel/rank_shares.py",
        "return cls(alone, rows, starts[rows])",
        "return cls(alone, rows, starts[: len(rows)])",
        ("train/test_rank_shares.py",),
    ),
    Fault(
        "a context is replaced at twice its budget",
        "skyrl_fast/rollout/compaction.py",
        "num_tokens > self._budget",
        "num_tokens > 2 * self._budget",
        ("rollout/test_compaction.py",),
    ),
    Fault(
        "a dropped history stays one context",
        "skyrl_fast/rollout/contexts.py",
        "if length >= parent_length:",
        "if length >= 0:",
        ("rollout/test_compaction.py",),
    ),
    Fault(
        "the last summary takes its reward from nowhere",
        "skyrl_fast/rollout/agent_loop.py",
        "        last.reward = turn.reward\n",
        "",
        ("rollout/test_compaction.py",),
    ),
    Fault(
        "a summary has the advantage of the turn before it",
        "skyrl_fast/train/algorithm/advantages.py",
        "np.where(is_of_another, after - 1, after)",
        "np.maximum(after - 1, 0)",
        ("train/test_summaries.py",),
    ),
    Fault(
        "GDPO counts a trajectory once for each of its rows",
        "skyrl_fast/ops/advantage/decoupled.py",
        "counted = total[last & is_compared].numpy()",
        "counted = total[is_compared].numpy()",
        ("ops/test_decoupled_advantage.py",),
    ),
    Fault(
        "an unfinished trajectory keeps the parts of its reward",
        "skyrl_fast/train/algorithm/filters.py",
        "parts = batch.reward_parts.masked_fill(rows[:, None], 0.0)",
        "parts = batch.reward_parts",
        ("train/test_gdpo.py",),
    ),
    Fault(
        "a misspelled part of the reward is always 0",
        "skyrl_fast/train/algorithm/reward_parts.py",
        "if name not in reported]",
        "if False]",
        ("train/test_gdpo.py",),
    ),
    Fault(
        "each role has optimizer steps of its own",
        "skyrl_fast/train/trainer.py",
        "settings.policy_mini_batch_size * groups_per_prompt",
        "settings.policy_mini_batch_size",
        ("train/test_roles.py",),
    ),
    Fault(
        "the engine gets the name of a role as that of an adapter",
        "skyrl_fast/rollout/policy_calls.py",
        "policy=None if self.are_roles else policy",
        "policy=policy",
        ("train/test_roles.py",),
    ),
    Fault(
        "a context has no credit for what comes after one within it",
        "skyrl_fast/train/algorithm/advantages.py",
        "np.maximum.accumulate(keys)",
        "keys",
        ("train/test_context_rewards.py",),
    ),
    Fault(
        "an off-policy correction forgets the weight of summaries",
        "skyrl_fast/train/algorithm/off_policy.py",
        "kept = kept * batch.token_weights",
        "kept = kept + 0 * batch.token_weights",
        ("train/test_summaries.py",),
    ),
    Fault(
        "a truncated summary is trained",
        "skyrl_fast/train/algorithm/filters.py",
        "has_summary & (reasons == LENGTH)",
        "has_summary & (reasons == STOP)",
        ("train/test_summaries.py",),
    ),
    Fault(
        "summaries count as turns",
        "skyrl_fast/train/metrics/rollouts.py",
        "return np.bincount(trajectory_ids) - summaries.astype(np.int64)",
        "return np.bincount(trajectory_ids)",
        ("train/test_summaries.py",),
    ),
    Fault(
        "what a chain keeps gets no gradient from the units below",
        "skyrl_fast/train/model/depth_first.py",
        "if leaf.grad is not None:",
        "if False:",
        ("train/test_depth_first.py",),
    ),
    Fault(
        "an adapter's product without its scale",
        "skyrl_fast/train/model/lora.py",
        "out.addmm_(inner, b.to(out.dtype).t(), alpha=layer.scaling[name])",
        "out.addmm_(inner, b.to(out.dtype).t())",
        ("train/test_lora.py",),
    ),
    Fault(
        "merged weights of LoRA without the adapter's scale",
        "skyrl_fast/train/model/lora.py",
        "a.to(dtype), alpha=scale)",
        "a.to(dtype))",
        ("train/test_lora.py",),
    ),
    Fault(
        "an engine reads all weights at the start of the trainer's memory",
        "skyrl_fast/rollout/engine/weights/transports/memory.py",
        "parts.append([*info, tensor.data_ptr() - self._first if tensor.numel() else 0])",
        "parts.append([*info, 0])",
        ("rollout/test_weight_memory.py",),
    ),
    Fault(
        "a worker reads the GPU of any rank",
        "skyrl_fast/rollout/engine/weights/transports/rank_ipc.py",
        "return open_bytes(handles[gpu], device, cuda)",
        "return open_bytes(next(iter(handles.values())), device, cuda)",
        ("rollout/test_rank_ipc.py",),
    ),
    Fault(
        "members wait for a worker that has failed",
        "skyrl_fast/rollout/engine/weights/transports/broadcast.py",
        "        group.give_up()  # no member waits for this one\n",
        "",
        ("rollout/test_rank_ipc.py::test_members_do_not_wait_for_a_worker_that_failed",),
    ),
    Fault(
        "a pass over weights that another has overtaken ends as complete",
        "skyrl_fast/train/parallel/rank_buckets.py",
        "    if current != number:",
        "    if bucket is not None and current != number:",
        ("rollout/test_rank_ipc.py::test_another_pass_ends_the_one_before",),
    ),
    Fault(
        "a weight is gathered by a collective in which gloo can crash",
        "skyrl_fast/train/parallel/sharding.py",
        "return _gather_rows(rows, tensor.shape, ranks.size)",
        "return tensor.detach().full_tensor()",
        ("train/test_ranks.py::test_no_weight_is_gathered_by_gloos_coalesced_gather",),
    ),
    Fault(
        "an update that has ended early leaves requests without an engine",
        "skyrl_fast/rollout/engine/pool.py",
        "        finally:\n            await self._serve_waiting()\n        return max",
        "        except ArithmeticError:\n            raise\n"
        "        await self._serve_waiting()\n        return max",
        (
            "rollout/test_engine_pool.py"
            "::test_requests_are_served_after_an_update_that_has_ended_early",
        ),
    ),
    Fault(
        "a bucket is filled again while workers copy it",
        "skyrl_fast/rollout/engine/weights/group.py",
        "        if self._backend == IPC:\n            self.meet()\n",
        "        if self._backend == IPC:\n",
        ("rollout/test_rank_ipc.py::test_a_bucket_is_free_when_all_workers_have_copied_it",),
    ),
    Fault(
        "a trajectory's reward is that of the row before its last",
        "csrc/advantage/advantage_cpu.cpp",
        "row_reward(kOp, rewards, layout, t->last_row[j]);",
        "row_reward(kOp, rewards, layout, t->last_row[j] > 0 ? t->last_row[j] - 1 : 0);",
        ("ops",),
    ),
    Fault(
        "the gradient of the entropy has the wrong sign",
        "csrc/logprob/logprob_rows.cpp",
        "t.b = static_cast<float>(-scale * grads.entropy * kLn2);",
        "t.b = static_cast<float>(scale * grads.entropy * kLn2);",
        ("ops",),
    ),
    Fault(
        "steps are joined although their last token differs",
        "csrc/merge/merge_cpu.cpp",
        "if (overlap == length) return true;",
        "if (overlap + 1 >= length) return true;",
        ("ops",),
    ),
    Fault(
        "a subtree ends one node early",
        "csrc/prefix_tree/prefix_tree_cpu.cpp",
        "out.ends[n] = static_cast<int32_t>(place.end);",
        "out.ends[n] = static_cast<int32_t>(place.end > n + 1 ? place.end - 1 : place.end);",
        ("ops",),
    ),
    Fault(
        "a node sees one node beyond its window",
        "csrc/prefix_tree/tree_attention.h",
        "const int64_t by_window = window > 0 ? depth - window + 1 : 0;",
        "const int64_t by_window = window > 0 ? depth - window : 0;",
        ("ops/test_tree_attention.py",),
    ),
    Fault(
        "a node sees the last node of the chunk before",
        "csrc/prefix_tree/tree_attention.h",
        "const int64_t by_chunk = chunk > 0 ? depth - depth % chunk : 0;",
        "const int64_t by_chunk = chunk > 0 ? depth - depth % chunk - 1 : 0;",
        ("ops/test_tree_attention.py",),
    ),
    Fault(
        "the gradient of sinks lacks their share of the softmax",
        "skyrl_fast/ops/prefix_tree/tiles.py",
        "shares = torch.exp2(LOG2_E * sinks.float()[:, None] - lse)",
        "shares = torch.ones_like(lse)",
        ("ops/test_tree_attention.py",),
    ),
    Fault(
        "the gradient of capped scores is that of uncapped ones",
        "csrc/prefix_tree/tree_tiles.cpp",
        "grads[k] *= 1.0f - t * t;",
        "grads[k] *= t * t < 4.0f ? 1.0f : 0.0f;",
        ("ops/test_tree_attention.py",),
    ),
    Fault(
        "FlexAttention's blocks do not know the window",
        "skyrl_fast/ops/prefix_tree/attention.py",
        "seen &= high[None] >= least.view(count, -1).amin(1)[:, None]",
        "seen &= high[None] > least.view(count, -1).amax(1)[:, None]",
        ("ops/test_tree_attention.py",),
    ),
    Fault(
        "layers with chunks are computed without them",
        "skyrl_fast/train/model/tree_forward.py",
        "return int(config.attention_chunk_size)",
        "return None",
        ("train/test_tree_training.py",),
    ),
    Fault(
        "a trained token of a pass is predicted from the state before the right one",
        "csrc/passes/pass_arrays_cpu.cpp",
        "out.hidden_index[m] = state(prompt + i - 1);",
        "out.hidden_index[m] = state(prompt + i > 1 ? prompt + i - 2 : 0);",
        ("train/test_micro_batch.py",),
    ),
    Fault(
        "rows share a sequence although their routes differ",
        "csrc/passes/sequence_runs_cpu.cpp",
        "if (rows.routes == nullptr) return true;",
        "return true;",
        ("train/test_micro_batch.py",),
    ),
    Fault(
        "a merged row's routes are taken from the step before",
        "csrc/merge/merge_cpu.cpp",
        "begins[row] = std::min(recorded, counts[row]);",
        "begins[row] = 0;",
        ("ops", "batch"),
    ),
    Fault(
        "log-probabilities of a later mini-batch are stored at the first one's place",
        "skyrl_fast/train/update.py",
        "start += mini.loss_mask.shape[0]",
        "start += 0",
        ("train/test_policy.py", "train/test_trainer.py", "train/test_update_rules.py"),
    ),
    Fault(
        "rows without an advantage are not trained although they have a KL loss",
        "skyrl_fast/train/update.py",
        "algorithm.use_kl_loss or algorithm.use_entropy_loss or",
        "algorithm.use_entropy_loss or",
        ("train/test_feature_pairs.py",),
    ),
    Fault(
        "groups may be one policy version older than the bound",
        "skyrl_fast/train/flow/group_schedule.py",
        "self.capacity = (max_staleness + 1) * batch_size",
        "self.capacity = (max_staleness + 2) * batch_size",
        ("train/test_group_schedule.py",),
    ),
    Fault(
        "an answer's end token is twice in the next prompt",
        "skyrl_fast/rollout/context.py",
        "ids = ids[index + 1 :]",
        "ids = ids[index:]",
        ("rollout/test_context.py", "rollout/test_families.py"),
    ),
    Fault(
        "a checkpoint's files are not compared with its manifest",
        "skyrl_fast/train/checkpoint/manifest.py",
        "if joined.hexdigest() != digest:",
        "if False:",
        ("train/test_checkpoint.py", "train/test_checkpoint_damage.py"),
    ),
    Fault(
        "the tokens of an answer before an update get the version after it",
        "skyrl_fast/rollout/continued.py",
        "versions += [version] * kept",
        "versions = [version] * (len(versions) + kept)",
        ("rollout/test_weight_gate.py",),
    ),
    Fault(
        "an appended end token is trained",
        "skyrl_fast/rollout/trajectory.py",
        "loss_mask=[1] * len(generation.token_ids) + [0] * len(appended),",
        "loss_mask=[1] * (len(generation.token_ids) + len(appended)),",
        ("rollout/test_agent_loop.py",),
    ),
    Fault(
        "a reward that is NaN is accepted",
        "skyrl_fast/rollout/env/answers.py",
        "if not abs(reward) <= LARGEST_REWARD:",
        "if abs(reward) > LARGEST_REWARD:",
        ("rollout/test_hostile_environments.py", "rollout/test_env.py"),
    ),
    Fault(
        "an environment changes the row that later samples get",
        "skyrl_fast/rollout/env/handler.py",
        "return self._make(env_class, copy_row(extras))",
        "return self._make(env_class, extras)",
        ("rollout/test_row_copies.py",),
    ),
    Fault(
        "tensors that the engine loaded with other values are not refused",
        "skyrl_fast/rollout/engine/weights/receipt.py",
        "                if got[name] not in (sent[name], RECEIVED)",
        "                if got[name] is None",
        ("rollout/test_weight_receipt.py", "rollout/test_weight_transfer.py"),
    ),
    Fault(
        "a server's answer may be longer than was asked for",
        "skyrl_fast/rollout/engine/generation_check.py",
        "if len(ids) > max_tokens:",
        "if len(ids) > max_tokens + 1:",
        ("rollout/test_remote_engine.py",),
    ),
    Fault(
        "an update's means weigh mini-batches alike, not tokens",
        "skyrl_fast/train/metrics/aggregate.py",
        "return sum(v * n for v, n in zip(values, counts, strict=True)) / total",
        "return sum(values) / len(values)",
        ("train/test_update_rules.py", "train/test_sft.py"),
    ),
    Fault(
        "a refused prompt counts as one that the template wrote",
        "skyrl_fast/gateway/prompt_ids.py",
        "            rendered, options = self._render(seen, tools, template_kwargs)",
        "            self._last = (list(messages), seen)\n"
        "            rendered, options = self._render(seen, tools, template_kwargs)",
        ("gateway/test_faults.py",),
    ),
    Fault(
        "the text of a stop string ends at its last occurrence",
        "skyrl_fast/rollout/turn.py",
        "            place = text.find(stop, max(0, known - len(stop) + 1))",
        "            place = -1",
        ("rollout/test_agent_loop.py",),
    ),
    Fault(
        "a reward for one call goes to the last one",
        "skyrl_fast/gateway/rewards.py",
        "step = self._calls[call]",
        "step = last",
        ("gateway/test_openai_chat.py",),
    ),
    Fault(
        "an answer that was cut keeps its reward",
        "skyrl_fast/train/algorithm/filters.py",
        'FINISHED_REASONS = frozenset({"stop", "max_turns"})',
        'FINISHED_REASONS = frozenset({"stop", "max_turns", "length"})',
        ("train/test_filters.py",),
    ),
    Fault(
        "the KL penalty of earlier rows does not reach the last one",
        "skyrl_fast/train/algorithm/kl_reward.py",
        "earlier = coef * trajectory_kl - penalty[last_rows]",
        "earlier = 0.0 * trajectory_kl",
        ("train/test_kl_reward.py",),
    ),
    Fault(
        "a policy's states are those of its own steps before",
        "skyrl_fast/train/algorithm/policies.py",
        "complete = [replace(t, steps=recorded_steps(t)) for t in trajectories]",
        "complete = list(trajectories)",
        ("train/test_feature_pairs.py",),
    ),
    Fault(
        "the state of an agent's step is the answer to the step before",
        "skyrl_fast/train/algorithm/anchor_states.py",
        "[START if step.state is None else step.state for step in steps]",
        "[START, *(step.observation for step in steps[:-1])][: len(steps)]",
        ("train/test_feature_pairs.py",),
    ),
    Fault(
        "answers of other policies are tokens of the environment",
        "skyrl_fast/train/algorithm/training_rows.py",
        "    if not trajectories:\n        return weights\n    assert",
        "    if True:\n        return weights\n    assert",
        ("train/test_feature_pairs.py",),
    ),
    Fault(
        "rows of several policies' trajectories are built undivided",
        "skyrl_fast/train/prepare_batch.py",
        "    if not config.call_names:\n        return build_rows",
        "    if True:\n        return build_rows",
        ("train/test_feature_pairs.py",),
    ),
    Fault(
        "shares of sequences are weighted by tokens",
        "skyrl_fast/train/metrics/aggregate.py",
        'if over == "sequences":',
        "if False:",
        ("train/test_feature_pairs.py",),
    ),
    Fault(
        "means over a critic's tokens weigh its mini-batches alike",
        "skyrl_fast/train/model/critic.py",
        "steps.append(Part(self._step(mini), tokens=tokens))",
        "steps.append(Part(self._step(mini), tokens=1))",
        ("train/test_feature_pairs.py",),
    ),
    Fault(
        "a policy's part of a trajectory ends for the reason of its own last step",
        "skyrl_fast/batch/from_trajectories.py",
        "reasons.append(trajectory.stop_reason)",
        "reasons.append(turns[-1].stop_reason if turns else trajectory.stop_reason)",
        ("train/test_feature_pairs.py",),
    ),
    Fault(
        "the only trajectory that is left of a group has an advantage",
        "skyrl_fast/train/prepare_batch.py",
        "return batch.with_(is_alone=alone[batch.group_ids.long()]), metrics",
        "return batch, metrics",
        ("train/test_feature_pairs.py",),
    ),
    Fault(
        "kl_cov compares the first pass with another one of the same weights",
        "skyrl_fast/train/update.py",
        "passed = mini.with_(old_logprobs=None)",
        "passed = mini",
        ("train/test_update_rules.py",),
    ),
    Fault(
        "a loss of a mini-batch without a coefficient chooses among rows with a gradient",
        "skyrl_fast/train/update.py",
        'if has_other_terms or reads_all or spec.scope == "mini_batch":',
        "if has_other_terms or reads_all:",
        ("train/test_update_rules.py",),
    ),
    Fault(
        "later epochs compare with the current policy",
        "skyrl_fast/train/update.py",
        "for_all = correct or update_epochs > 1",
        "for_all = correct",
        ("train/test_feature_pairs.py",),
    ),
    Fault(
        "the entropy of the environment's tokens is in the loss",
        "skyrl_fast/train/update.py",
        "weight = there(here.of_tokens(rows, index) * sampled)",
        "weight = there(here.of_tokens(rows, index))",
        ("train/test_feature_pairs.py",),
    ),
    Fault(
        "the clip's upper bound does not hold",
        "csrc/policy_loss/token_loss.h",
        "  const T bound = -advantage * clamp_to(ratio, p.clip_low, p.clip_high);",
        "  const T bound = -advantage * clamp_to(ratio, p.clip_low, p.clip_ratio_c);",
        ("ops/test_policy_loss.py", "ops/test_losses.py"),
    ),
    Fault(
        "a part of the store is published before it is complete",
        "skyrl_fast/trajectory_store/writer.py",
        "            partial.replace(path)\n        finally:",
        "            pass\n        finally:",
        ("viewer/test_trajectory_store.py", "viewer/test_trajectory_writing.py"),
    ),
    Fault(
        "offloaded moments come back as they first were",
        "skyrl_fast/train/model/offload.py",
        "            if is_first or not self._is_constant:",
        "            if is_first:",
        ("train/test_optimizer.py",),
    ),
    Fault(
        "a session stays with an engine that has many more requests",
        "skyrl_fast/rollout/engine/pool.py",
        "if member is None or not member.up or len(member.calls) > most:",
        "if member is None or not member.up:",
        ("rollout/test_engine_pool.py",),
    ),
    Fault(
        "engines of one machine have the same GPUs",
        "skyrl_fast/rollout/engine/from_settings.py",
        "engine.gpu_ids[number * each : (number + 1) * each]",
        "engine.gpu_ids[:each]",
        ("rollout/test_node_engine.py",),
    ),
    Fault(
        "a server that sleeps gets weights before its memory",
        "skyrl_fast/rollout/engine/remote.py",
        '            await self._wake_up("weights")\n            if self._adapter is None:',
        "            if self._adapter is None:",
        ("rollout/test_remote_engine.py",),
    ),
    Fault(
        "the folder of a running process is removed",
        "skyrl_fast/system/temporary_folder.py",
        "            lock_file(lock)\n        except OSError:  # another user's, or in use",
        "            pass\n        except OSError:  # another user's, or in use",
        ("rollout/test_weight_update.py::test_next_update_deletes_the_files_of_a_killed_process",),
    ),
    Fault(
        "the first step of a trajectory counts as its last",
        "skyrl_fast/batch/from_trajectories.py",
        "last_rows = np.cumsum(num_steps) - 1",
        "last_rows = np.cumsum(num_steps) - num_steps",
        ("batch",),
    ),
    Fault(
        "each epoch has the prompts in the same order",
        "skyrl_fast/train/data/prompts.py",
        "manual_seed(self._seed * 1_000_003 + epoch)",
        "manual_seed(self._seed * 1_000_003)",
        ("train/test_prompts.py",),
    ),
    Fault(
        "passages with the last score of a search are left out",
        "examples/search_r1/retrieval/index.py",
        "candidates = candidates[scores[candidates] >= least]",
        "candidates = candidates[scores[candidates] > least]",
        ("examples/test_retrieval.py",),
    ),
    Fault(
        "the loss for TRL clips the ratio above twice its bound",
        "skyrl_fast/integrations/trl/loss.py",
        "Regular(epsilon_low, epsilon_high)",
        "Regular(epsilon_low, 2 * epsilon_high)",
        ("integrations/test_trl.py",),
    ),
    Fault(
        "an agent's calls all act in the same state",
        "skyrl_fast/gateway/choices.py",
        "state=self._shown_text(call, prompt, parent),",
        'state="",',
        ("train/test_crossings.py::test_an_agents_states_are_the_messages_since_the_last_answer",),
    ),
    Fault(
        "the first step of a policy counts as the start of its trajectory",
        "skyrl_fast/train/algorithm/anchor_states.py",
        "START if step.state is None else",
        "START if step.state is None or step is steps[0] else",
        (
            "train/test_crossings.py::test_a_policys_states_are_what_the_environment_showed_before_its_steps",
        ),
    ),
    Fault(
        "another policy's answers are trained as observations",
        "skyrl_fast/train/algorithm/training_rows.py",
        "_without_answers(weights, rows, trajectories)",
        "weights",
        ("train/test_crossings.py::test_another_policys_answers_are_no_observations",),
    ),
    Fault(
        "a checkpoint is told from one that was set aside by its name",
        "skyrl_fast/train/cluster.py",
        "return str(checkpoint), checkpoint.stat().st_ino, content",
        'return str(checkpoint), 0, b""',
        ("train/test_checkpoint_identity.py",),
    ),
    Fault(
        "the outcome of one row per trajectory is its last turn's reward",
        "skyrl_fast/train/metrics/outcomes.py",
        "t.outcome(sums_rewards=sums_rewards)",
        "t.outcome(sums_rewards=False)",
        ("train/test_crossings.py::test_one_row_per_trajectory_has_one_outcome_everywhere",),
    ),
    Fault(
        "shares of sequences are weighted by tokens",
        "skyrl_fast/train/metrics/aggregate.py",
        'if over == "sequences":',
        "if False:",
        ("train/test_means_of_batches.py::test_shares_of_sequences_and_the_spread_of_ratios",),
    ),
    Fault(
        "a critic's means weigh mini-batches alike",
        "skyrl_fast/train/model/critic.py",
        "tokens = int((mini.loss_mask != 0).sum())",
        "tokens = 1",
        (
            "train/test_means_of_batches.py::test_means_of_a_critics_tokens_do_not_depend_on_the_mini_batches",
        ),
    ),
    Fault(
        "the tokens of a merged row are stored as those of its first step",
        "skyrl_fast/trajectory_store/trained.py",
        "is_change = owners[1:] != owners[:-1]",
        "is_change = owners[1:] < -1",
        (
            "train/test_crossings.py::test_a_dropped_token_that_is_sampled_again_is_stored_untrained",
        ),
    ),
    Fault(
        "a dropped token that is sampled again is stored as trained twice",
        "skyrl_fast/trajectory_store/trained.py",
        "at = slice(begin, end)",
        "at = slice(begin, begin + len(trajectories[number].steps[owner].response_ids))",
        (
            "train/test_crossings.py::test_a_dropped_token_that_is_sampled_again_is_stored_untrained",
        ),
    ),
    Fault(
        "metrics of several policies read rows that none of them trains",
        "skyrl_fast/train/prepare_batch.py",
        "SampledRows(with_records(batch_from_trajectories(trajectories), trajectories), None)",
        "build_rows(trajectories, config)",
        (
            "train/test_crossings.py::test_policies_with_one_row_per_trajectory_are_judged_and_reported",
        ),
    ),
    Fault(
        "the largest KL of a trajectory is the mean of all",
        "skyrl_fast/train/algorithm/kl_reward.py",
        '"loss/avg_kl_max": float(means.max())',
        '"loss/avg_kl_max": float(means.mean())',
        ("train/test_kl_reward.py",),
    ),
    Fault(
        "a resume does not see new keys of mappings",
        "skyrl_fast/train/checkpoint/resumed_settings.py",
        "for key in {**after, **before}:",
        "for key in after.keys() & before.keys():",
        ("train/test_resumed_settings.py::test_keys_of_mappings_are_compared",),
    ),
    Fault(
        "a critic's stretched schedule is not warned of",
        "skyrl_fast/train/checkpoint/starting_point.py",
        "if settings.critic.model.path is not None:",
        "if False:",
        ("train/test_resumed_settings.py::test_another_length_is_warned_of_for_each_schedule",),
    ),
    Fault(
        "the last evaluation is reported again after its callback failed",
        "skyrl_fast/train/trainer.py",
        "self._note_end()  # now:",
        "pass  # now:",
        (
            "train/test_dynamic_sampling.py::test_last_evaluation_is_reported_once_if_its_callback_fails",
        ),
    ),
    Fault(
        "the weight of a loss term may be infinite",
        "skyrl_fast/ops/policy_loss/losses.py",
        '"weight of the distance from the old log-probabilities", at_least=0, finite=True',
        '"weight of the distance from the old log-probabilities", at_least=0',
        ("ops/test_policy_loss.py::test_errors_name_op_and_argument",),
    ),
    Fault(
        "the steepness of a gate may be infinite",
        "skyrl_fast/ops/policy_loss/losses.py",
        '"steepness of the gate elsewhere", above=0, finite=True',
        '"steepness of the gate elsewhere", above=0',
        ("ops/test_policy_loss.py::test_errors_name_op_and_argument",),
    ),
    Fault(
        "nothing is said of the reference of a continued adapter",
        "skyrl_fast/train/run.py",
        "if lora.path is not None and uses_reference(config)",
        "if False and uses_reference(config)",
        ("train/test_second_models.py::test_the_reference_of_a_continued_adapter_is_named",),
    ),
    Fault(
        "an adapter continues on other base weights unsaid",
        "skyrl_fast/train/model/lora.py",
        "if trained_on != digest:",
        "if False:",
        ("train/test_lora.py::test_adapter_is_named_if_its_base_weights_have_changed",),
    ),
    Fault(
        "a part of a cut trajectory ends as its own last step did",
        "skyrl_fast/train/algorithm/policies.py",
        "return replace(trajectory, steps=steps)",
        "return replace(trajectory, steps=steps, stop_reason=steps[-1].stop_reason)",
        ("train/test_crossings.py::test_a_cut_trajectory_is_cut_for_each_of_its_policies",),
    ),
    Fault(
        "the only sample that calls a policy has its reward as advantage",
        "skyrl_fast/train/algorithm/advantages.py",
        "if batch.is_alone is not None and spec.compares_group:",
        "if False:",
        ("train/test_crossings.py::test_the_only_sample_that_calls_a_policy_has_no_advantage",),
    ),
    Fault(
        "a second model may have fewer token ids than the policy",
        "skyrl_fast/train/setup/model_checks.py",
        "if size is not None and size <= max(ids.values(), default=0):",
        "if False:",
        ("train/test_second_models.py::test_another_vocabulary_is_refused",),
    ),
    Fault(
        "a critic may have another vocabulary than the policy",
        "skyrl_fast/train/setup/model_checks.py",
        'others.append(("critic", trainer.critic.model.path))',
        "pass",
        ("train/test_second_models.py::test_the_vocabulary_of_each_second_model_is_compared",),
    ),
    Fault(
        "a second model may have another tokenizer",
        "skyrl_fast/train/setup/model_checks.py",
        "if known != number or names.get(number, token) != token:",
        "if False:",
        ("train/test_second_models.py::test_another_vocabulary_is_refused",),
    ),
    Fault(
        "the gateway's command samples from the base of an adapter",
        "skyrl_fast/commands/gateway.py",
        'check_without_adapter(config, "skyrl-fast gateway")',
        "pass",
        ("project/test_config.py::test_commands_that_sample_from_the_base_refuse_an_adapter",),
    ),
    Fault(
        "a prompt is tried on the base of an adapter",
        "skyrl_fast/commands/try_prompt.py",
        'check_without_adapter(config, "skyrl-fast try --engine")',
        "pass",
        ("project/test_config.py::test_commands_that_sample_from_the_base_refuse_an_adapter",),
    ),
    Fault(
        "a resumed run reads the new settings that it says stay",
        "skyrl_fast/train/checkpoint/resumed_settings.py",
        "        if not key.startswith(kept):\n            continue",
        "        if True:\n            continue",
        ("train/test_resumed_settings.py::test_what_stays_is_what_the_run_reads",),
    ),
    Fault(
        "tools of a server's later pages are left out",
        "skyrl_fast/adapters/mcp_tools.py",
        "tools += page.tools",
        "pass",
        ("adapters/test_mcp_tools.py::test_tools_of_all_pages_and_results_of_all_kinds",),
    ),
    Fault(
        "arguments that a server refuses end the trajectory",
        "skyrl_fast/adapters/mcp_tools.py",
        "if _error_code(error) == CONNECTION_CLOSED:",
        "if True:",
        ("adapters/test_mcp_tools.py::test_tools_of_all_pages_and_results_of_all_kinds",),
    ),
    Fault(
        "a structured result of a tool is empty text",
        "skyrl_fast/adapters/mcp_tools.py",
        "if structured is not None and not text:",
        "if False:",
        ("adapters/test_mcp_tools.py::test_tools_of_all_pages_and_results_of_all_kinds",),
    ),
    Fault(
        "a tool's image is empty text",
        "skyrl_fast/adapters/mcp_tools.py",
        'return f"[{kind}: no text]"',
        'return ""',
        ("adapters/test_mcp_tools.py::test_tools_of_all_pages_and_results_of_all_kinds",),
    ),
    Fault(
        "the text of a tool's resource is left out",
        "skyrl_fast/adapters/mcp_tools.py",
        'text = getattr(resource, "text", None)',
        "text = None",
        ("adapters/test_mcp_tools.py::test_tools_of_all_pages_and_results_of_all_kinds",),
    ),
    Fault(
        "each call of a coroutine reward has an event loop of its own",
        "skyrl_fast/rollout/env/reward_functions.py",
        "loop_thread().run_to_end(_await_value(found))",
        '__import__("asyncio").run(_await_value(found))',
        ("rollout/test_coroutine_rewards.py",),
    ),
    Fault(
        "the guide does not say which verifiers need processes",
        "docs/guide/environments.md",
        "a verifier that limits its time by an alarm (SIGALRM) needs `environment.workers=process`",
        "a verifier that limits its time by an alarm does not",
        ("rollout/test_env_processes.py::test_alarms_need_a_process_as_the_guide_says",),
    ),
    Fault(
        "a host's function is replaced although one that it calls has changed",
        "skyrl_fast/integrations/source.py",
        "return fingerprint([*functions, *callees])",
        "return fingerprint(functions)",
        (
            "integrations/test_skyrl_drop_in.py::test_function_is_kept_if_one_that_it_calls_has_changed",
        ),
    ),
    Fault(
        "verl's functions are replaced whatever their source",
        "skyrl_fast/integrations/verl.py",
        "if source in KNOWN[name]:",
        "if True:",
        ("integrations/test_verl.py::test_function_of_unknown_source_is_kept_with_a_warning",),
    ),
    Fault(
        "a client's mistake is an error of the engine",
        "skyrl_fast/gateway/session.py",
        "if isinstance(error, RefusedRequestError):",
        "if False:",
        ("gateway/test_client_mistakes.py",),
    ),
    Fault(
        "template arguments may have names of the request's own",
        "skyrl_fast/gateway/prompt_ids.py",
        "        if taken:",
        "        if False:",
        ("gateway/test_client_mistakes.py",),
    ),
    Fault(
        "what is nested too deeply for Python is an error of the server",
        "skyrl_fast/gateway/server.py",
        "        except RecursionError:",
        "        except ZeroDivisionError:",
        ("gateway/test_client_mistakes.py",),
    ),
    Fault(
        "a body is parsed however many values it has",
        "skyrl_fast/gateway/request_body.py",
        "    _check_size(body)\n    try:",
        "    try:",
        ("gateway/test_request_body.py",),
    ),
    Fault(
        "an answer is trained although its client had left",
        "skyrl_fast/gateway/server.py",
        "if await request.is_disconnected():  # before",
        "if False:  # before",
        (
            "gateway/test_faults.py::test_an_answer_that_is_ready_at_once_is_not_trained_if_its_client_has_left",
        ),
    ),
    Fault(
        "a prompt that is too short to join overlaps with nothing",
        "csrc/merge/merge_cpu.cpp",
        "if (!rows.continues(row)) continue;",
        "if (!rows.continues(row) || rows.length(row - 1) > rows.prompt_lengths[row]) continue;",
        ("ops/test_merge.py::test_overlaps_are_also_those_of_prompts_that_are_too_short",),
    ),
    Fault(
        "a row in a list whose prompt is too short to join overlaps with nothing",
        "csrc/merge/merge_bind.cpp",
        "std::min(shape.length(row - 1), shape.prompt_lengths[row]) : 0;",
        "shape.length(row - 1) * (shape.length(row - 1) <= shape.prompt_lengths[row]) : 0;",
        ("ops/test_merge.py::test_overlaps_are_also_those_of_prompts_that_are_too_short",),
    ),
    Fault(
        "rewards of rows are taken for rewards of tokens",
        "skyrl_fast/ops/_rows.py",
        "and (prefers_tokens or rewards.shape != (num_rows,)),",
        "and True,",
        ("ops/test_advantage.py::test_as_many_rewards_as_rows_are_rewards_of_rows",),
    ),
    Fault(
        "a correction's bounds are not checked",
        "skyrl_fast/ops/policy_loss/off_policy.py",
        "    _check_bounds(rules)",
        "    pass",
        ("ops/test_off_policy.py::test_bounds_that_mean_nothing_are_refused",),
    ),
    Fault(
        "an earlier answer is trained inside the next one",
        "skyrl_fast/rollout/context.py",
        "if parted < len(before.rstrip()):",
        "if False:",
        ("rollout/test_families.py::test_each_of_several_answers_in_a_row_is_its_own_text",),
    ),
    Fault(
        "code that a row names is imported although that is not allowed",
        "skyrl_fast/rollout/env/factory.py",
        "if is_of_a_row and not config.import_row_env_classes:",
        "if False:",
        (
            "train/test_start_checks.py::test_code_that_a_row_names_is_imported_only_if_that_is_allowed",
        ),
    ),
    Fault(
        "the gateway takes all descriptors for connections",
        "skyrl_fast/gateway/connections.py",
        "if len(self.connections) > limit:",
        "if False:",
        ("gateway/test_faults.py::test_connections_beyond_the_limit_are_closed",),
    ),
    Fault(
        "a silent connection is never closed",
        "skyrl_fast/gateway/connections.py",
        "elif self._deadline is None:",
        "elif False:",
        ("gateway/test_faults.py::test_a_connection_without_a_request_is_closed",),
    ),
    Fault(
        "the memory of a row is read although later rows have changed it",
        "csrc/bindings/rows.cpp",
        "if (ran_python_) borrow_again();",
        "",
        ("ops/test_pack.py::test_a_row_that_changes_an_earlier_one_is_an_error",),
    ),
    Fault(
        "a set is text in an agent's row",
        "skyrl_fast/gateway/agents/command.py",
        "default=_as_json)",
        "default=str)",
        ("gateway/test_command.py::test_a_command_gets_the_row_as_json_values",),
    ),
    Fault(
        "answers with loss_weight 0 are trained",
        "skyrl_fast/train/data/demonstrations.py",
        '"trainable", "loss_weight")',
        '"trainable")',
        ("train/test_sft.py::test_flags_exclude_answers",),
    ),
)


def main() -> None:
    """Try each fault; exit with 1 if one is not noticed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--only", default="", help="part of a fault's description")
    options = parser.parse_args()
    python = (options.venv.resolve() / "bin" / "python").as_posix()
    chosen = [fault for fault in FAULTS if options.only in fault.what]
    if not chosen:  # pytest would run all tests
        parser.error(f"--only: expected a part of a fault's description, got {options.only!r}")
    copy_sources(TREE, COPIED, FILES)
    build(python)
    folders = sorted({name for fault in chosen for name in fault.tests})
    if failed := failed_tests(python, folders):
        raise SystemExit(f"without any fault these fail already: {', '.join(failed)}")
    unnoticed = 0
    for fault in chosen:
        start = time.monotonic()
        noticed = try_fault(python, fault)
        unnoticed += not noticed
        outcome = "noticed" if noticed else "NOT NOTICED"
        print(f"{outcome}: {fault.what} ({time.monotonic() - start:.0f} s)", flush=True)
    sys.exit(1 if unnoticed else 0)


def build(python: str) -> None:
    """Build the extension of the copy."""
    environment = os.environ | {"PATH": f"{Path(python).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["make", "ext", f"PYTHON={python}"],
        cwd=TREE, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"the extension of {TREE} cannot be built:\n{done.stdout[-4000:]}")


def failed_tests(python: str, folders: Sequence[str]) -> list[str]:
    """Return the first default tests that fail in these folders of python_tests."""
    command = [python, "-m", "pytest", "-q", "-x", "-n", "auto", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(f"python_tests/{name}" for name in folders)],
        cwd=TREE, env=os.environ | {"PYTHONPATH": str(TREE)}, capture_output=True, text=True,
    )  # fmt: skip
    return [line[:150] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]


def try_fault(python: str, fault: Fault) -> bool:
    """Return whether a test fails with this fault."""
    path = TREE / fault.path
    right = path.read_text(encoding="utf-8")
    if right.count(fault.right) != 1:
        raise SystemExit(f"{fault.path}: expected one place with {fault.right!r}: adapt the fault")
    path.write_text(right.replace(fault.right, fault.wrong), encoding="utf-8")
    try:
        if fault.path.startswith("csrc"):
            build(python)
        failed = failed_tests(python, fault.tests)
        print("\n".join(failed[:1]), flush=True)
        return bool(failed)
    finally:
        path.write_text(right, encoding="utf-8")
        if fault.path.startswith("csrc"):
            build(python)


if __name__ == "__main__":
    main()

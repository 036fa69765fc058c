"""Mode "fixed": dynamic sampling of step-wise outputs by complete groups and outcomes.

N rows. Outputs that are not step-wise are passed to SkyRL.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from skyrl_fast.integrations.skyrl.outputs import concatenate_generator_outputs
from skyrl_fast.integrations.skyrl.replacement import ORIGINALS

FILTER, REPLACE = "handle_filter_sampling", "handle_replace_sampling"


def handle_filter_sampling(
    generator_output: Any, uids: list[str], sampling_config: Any, collected_state: Any
) -> tuple[Any, list[str], bool, Any]:
    """Keep complete informative groups; sample until there are `train_batch_size` of them."""
    output = generator_output
    if output.get("is_last_step") is None:
        return ORIGINALS.require(FILTER)(output, uids, sampling_config, collected_state)
    good = _informative(output, uids)
    rows = [row for row, uid in enumerate(uids) if good[uid]]
    state = collected_state
    kept = _select(output, rows) if rows else None
    before = state.get("collected_generator_output")
    if before is not None and kept is not None:
        kept = concatenate_generator_outputs([before, kept], step_wise=True)
    state["collected_generator_output"] = before if kept is None else kept
    state["collected_uids"] = [*state.get("collected_uids", []), *(uids[row] for row in rows)]
    groups = list(dict.fromkeys(state["collected_uids"]))
    state["num_prompts_in_batch"] = len(groups)
    wanted = sampling_config["train_batch_size"]
    if len(groups) < wanted:
        return output, uids, True, state
    chosen = set(groups[:wanted])
    rows = [row for row, uid in enumerate(state["collected_uids"]) if uid in chosen]
    final = _select(state["collected_generator_output"], rows)
    return final, [state["collected_uids"][row] for row in rows], False, None


def handle_replace_sampling(
    generator_output: Any, uids: list[str], sampling_config: Any
) -> tuple[Any, list[str], bool]:
    """Replace the other groups by copies of informative groups, under new uids."""
    output = generator_output
    if output.get("is_last_step") is None:
        return ORIGINALS.require(REPLACE)(output, uids, sampling_config)
    from skyrl_fast.train.algorithm.dynamic_sampling import replacement_groups

    good = _informative(output, uids)
    informative = np.array(list(good.values()))
    if informative.sum() <= len(good) * sampling_config["min_replace_ratio"]:
        return output, uids, True
    random = np.random.default_rng(np.random.randint(2**31))  # follows SkyRL's global seed
    names = list(good)
    rows: list[int] = []
    renamed: list[str] = []
    copies: dict[str, int] = {}
    for place, source in enumerate(replacement_groups(informative, random=random)):
        uid = names[source]
        group_rows = [row for row, name in enumerate(uids) if name == uid]
        if place != source:
            copies[uid] = copies.get(uid, 0) + 1
            uid = f"{uid}+{copies[uid]}"
        rows += group_rows
        renamed += [uid] * len(group_rows)
    result = _select(output, rows)
    result["trajectory_ids"] = [
        dataclasses.replace(tid, instance_id=uid)
        for tid, uid in zip(result["trajectory_ids"], renamed, strict=True)
    ]
    return result, renamed, False


def _informative(output: Any, uids: list[str]) -> dict[str, bool]:
    """Return uid -> whether outcomes of its live trajectories differ, or it has one trajectory."""
    outcomes: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    live = False
    for row, uid in enumerate(uids):
        live = live or any(output["loss_masks"][row])
        if output["is_last_step"][row]:
            sizes[uid] = sizes.get(uid, 0) + 1
            reward = output["rewards"][row]
            score = float(sum(reward) if isinstance(reward, list) else reward)
            outcomes.setdefault(uid, []).extend([score] if live else [])
            live = False
    return {
        uid: sizes[uid] == 1 or (len(scores) > 0 and max(scores) > min(scores))
        for uid, scores in outcomes.items()
    }


def _select(output: Any, rows: list[int]) -> dict[str, Any]:
    """Return these rows of every field; metrics are not changed."""
    result: dict[str, Any] = {}
    for field, value in output.items():
        if field == "rollout_metrics" or value is None:
            result[field] = value
        elif isinstance(value, dict):
            result[field] = {name: [part[row] for row in rows] for name, part in value.items()}
        else:
            result[field] = [value[row] for row in rows]
    return result

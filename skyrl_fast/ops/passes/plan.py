"""Forward passes of ragged rows: which rows share one, and the arrays of each.

N rows, S tokens, A response tokens, P passes. Of a pass: n sequences padded on the right to length
L, or 1 of T nodes, and M trained tokens. E recorded routes, B kept tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from skyrl_fast import _C
from skyrl_fast.ops import _backend

_NO_LIMIT = 1 << 62  # tokens, in the kernels' 64 bits


@dataclass(frozen=True, slots=True)
class PassLayout:
    """How a pass lays out its n rows: it can be planned with this where only these rows are.

    Args:
        is_tree: the pass is of prefix trees, else of sequences.
        numbers: (3, n) int64. First the rows, ascending. Then of sequences the number of each row's
            sequence, and zeros; of trees the rows depth first, as indices into the ascending
            ones, and the nodes that each shares with the one before it.
    """

    is_tree: bool
    numbers: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """(n,) int64, ascending."""
        rows: np.ndarray = self.numbers[0]
        return rows

    def with_rows(self, rows: np.ndarray) -> PassLayout:
        """Return the layout of rows with these numbers."""
        return PassLayout(self.is_tree, np.stack((rows, *self.numbers[1:])))


class PassPlan:
    """The passes that compute the logprob of every trained token of some rows.

    Design: docs/design/019-prefix-tree.md.

    Args:
        tokens: (S,) int32; row i is `tokens[cu_seqlens[i] : cu_seqlens[i + 1]]`.
        cu_seqlens, cu_responses: (N + 1,) offsets of the rows' tokens and response tokens.
        trained: (A,) bool.
        group_ids, trajectory_ids: (N,) integers; rows of a trajectory are adjacent.
        rows: (N,) bool, rows to visit; those without a trained token are left out.
        token_budget: most tokens of a pass, padding included; a longer row is separate.
        keep_trajectories: a trajectory's rows share a pass.
        tree: lay rows out as prefix trees; else as sequences, which rows of a trajectory share
            where contexts only grew.
        costs: with `tree`, seconds per token and per pair of tokens as sequences, and as trees, and
            per segment of a tree; groups that take less as sequences are laid out as these. None:
            all are trees.
        length_limits: rows of sequences share a pass if they are longer than equally many.
        longest_row: of sequences, in tokens; 0: any.
        routes, cu_routes: (E, ...) any dtype and (N + 1,) offsets, those of each row's first
            tokens. Rows share a token only where their routes agree.

    Raises:
        ValueError: a trained row with an empty prompt, so that nothing predicts its first token; a
            trajectory that must stay together but is on both sides of a limit; a row that is too
            long; or arrays that do not match.
    """

    def __init__(
        self,
        tokens: torch.Tensor,
        cu_seqlens: torch.Tensor,
        cu_responses: torch.Tensor,
        trained: torch.Tensor,
        *,
        group_ids: torch.Tensor,
        trajectory_ids: torch.Tensor,
        rows: torch.Tensor,
        token_budget: int,
        keep_trajectories: bool = False,
        tree: bool = False,
        costs: tuple[float, ...] | None = None,
        length_limits: Sequence[int] = (),
        longest_row: int = 0,
        routes: torch.Tensor | None = None,
        cu_routes: torch.Tensor | None = None,
    ) -> None:
        # Batches have offsets of 32 bits unless they are very large.
        columns = (cu_seqlens, cu_responses, group_ids, trajectory_ids)
        # It holds a few numbers per row and the trained tokens, but none of these tensors.
        plan = _C.PassPlan(
            tokens,
            trained,
            tuple(column.to(torch.int64) for column in columns),
            rows,
            None if cu_routes is None else (routes, cu_routes.to(torch.int64)),
            min(token_budget, _NO_LIMIT),
            keep_trajectories,
            tree,
            costs,
            list(length_limits),
            longest_row,
            _backend.num_threads(),
        )
        self._set_plan(plan)

    @classmethod
    def from_layouts(
        cls,
        tokens: torch.Tensor,
        cu_seqlens: torch.Tensor,
        cu_responses: torch.Tensor,
        trained: torch.Tensor,
        layouts: Sequence[PassLayout],
        *,
        routes: torch.Tensor | None = None,
        cu_routes: torch.Tensor | None = None,
    ) -> PassPlan:
        """Return the plan of these passes, of which another plan had the layouts.

        The arguments are those of a plan; rows that are in no pass may be missing.

        Raises:
            ValueError: the layouts are not those of passes of these rows.
        """
        plan = _C.PassPlan(
            tokens,
            trained,
            cu_seqlens.to(torch.int64),
            cu_responses.to(torch.int64),
            len(cu_seqlens) - 1,
            None if cu_routes is None else (routes, cu_routes.to(torch.int64)),
            [(layout.is_tree, layout.numbers) for layout in layouts],
            _backend.num_threads(),
        )
        result = cls.__new__(cls)
        result._set_plan(plan)
        return result

    def _set_plan(self, plan: _C.PassPlan) -> None:
        self._plan = plan
        # Few numbers: the arrays of a pass are made when it is reached, one pass at a time.
        # Columns: of trees or not, sequences, width, rows, trained tokens.
        self._sizes = np.empty((self._plan.num_passes, 5), dtype=np.int64)
        self._plan.write_sizes(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def num_tokens(self) -> np.ndarray:
        """(P,) int64 tokens of each pass, padding included."""
        tokens: np.ndarray = self._sizes[:, 1] * self._sizes[:, 2]
        return tokens

    def layout(self, number: int) -> PassLayout:
        """Return how a pass lays out its rows."""
        is_tree, _, _, num_rows, _ = self._sizes[number].tolist()
        numbers = np.empty((3, num_rows), dtype=np.int64)
        self._plan.write_layout(number, numbers)
        return PassLayout(bool(is_tree), numbers)

    def arrays(
        self,
        number: int,
        tokens: torch.Tensor,
        *,
        routes: torch.Tensor | None = None,
        kept: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the arrays of a pass under the names that `MicroBatch` and `NodeTree` give them.

        Args:
            tokens, routes: those of the plan; without `routes` none are written.
            kept: (A,) int32 number of tokens that each response token was sampled from, (B,) int32
                these, (N + 1,) int64 offsets of the rows; see `StepBatch.num_kept`.
        """
        is_tree, count, width, num_rows, num_trained = self._sizes[number].tolist()

        def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="cpu")

        names = ("hidden_index", "target_ids", "response_index", "copies")
        out = {name: empty(num_trained) for name in names}
        out |= {"input_ids": empty(count, width), "rows": empty(num_rows)}
        if is_tree:
            out["parents"], out["ends"] = empty(2, width, dtype=torch.int32)
            out["positions"] = empty(1, width)
        if routes is not None:
            out["expert_indices"] = routes.new_empty((count, width, *routes.shape[1:]))
            out["router_padding_mask"] = empty(count, width, dtype=torch.bool)
        if kept is not None:
            num_kept = self._plan.num_kept_tokens(number, kept)
            out["kept_ids"] = empty(num_kept, dtype=torch.int32)
            out["cu_kept"] = empty(num_trained + 1)
        distinct = self._plan.write(number, tokens, routes, kept, out)
        # No two rows share a trained token.
        if distinct == num_trained:
            del out["copies"]
            return out
        # The log-probability of a token that several rows share is computed once; `copies` says
        # where it belongs.
        for name in ("hidden_index", "target_ids"):
            out[name] = out[name][:distinct]
        if kept is not None:
            out["cu_kept"] = out["cu_kept"][: distinct + 1]
            out["kept_ids"] = out["kept_ids"][: int(out["cu_kept"][-1])]
        return out


def balance_parts(loads: np.ndarray, budget: int, *, multiple: int = 1) -> tuple[np.ndarray, int]:
    """Return (n,) the part of each item, numbered by decreasing load, and the number of parts.

    Args:
        loads: (n,) int64; those of a part add up to `budget` at most.
        multiple: of which the number of parts is one.
    """
    # The largest item goes to the part with the smallest load (LPT rule, Graham 1969), with the
    # fewest parts whose loads are within the budget; an item beyond it is alone.
    parts = np.empty(len(loads), dtype=np.int64)
    return parts, _C.balanced_parts(loads, budget, multiple, parts)

"""Several sources of prompts, mixed by weights that a curriculum may change."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from skyrl_fast.errors import RunError
from skyrl_fast.system.importing import load_setting_function
from skyrl_fast.train.data.prompts import Prompt, PromptSampler

logger = logging.getLogger(__name__)

SETTING = "data.mixture"
CURRICULUM = "data.curriculum"

# Called with the step that was trained and the statistics of each source's prompts in it; it
# returns new weights, or None to keep those that it has.
Curriculum = Callable[[int, Mapping[str, Mapping[str, float]]], Mapping[str, float] | None]


class CurriculumError(RunError):
    """The curriculum raised, or returned weights that are none."""


def sources_of(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """Return the numbers of each source's prompts, by `data_source`.

    Raises:
        ValueError: a prompt has no source.
    """
    found: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        if not prompt.data_source:
            raise ValueError(
                "expected prompts with a data_source, or files whose names are the sources, got "
                f"none for prompt {prompt.uid}"
            )
        found.setdefault(prompt.data_source, []).append(number)
    return found


def check_weights(weights: Any, sources: Sequence[str]) -> dict[str, float]:
    """Return the weights of all sources, 0 of those that are not named.

    Raises:
        ValueError: one is of an unknown source, or no finite number of at least 0; or all are 0.
    """
    if not isinstance(weights, Mapping):
        raise ValueError(f"expected a weight for each source, got {weights!r:.100}")
    unknown = [name for name in weights if name not in sources]
    if unknown:
        raise ValueError(
            f"expected weights of the sources {', '.join(sources)}, got one of {unknown[0]!r:.100}"
        )
    result = {}
    for name in sources:
        weight = weights.get(name, 0.0)
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not math.isfinite(weight) or weight < 0:
            raise ValueError(f"{name}: expected a finite weight of at least 0, got {weight!r:.100}")
        result[name] = float(weight)
    if not any(result.values()):
        raise ValueError("expected a weight above 0, got none")
    return result


def shares_of(weights: Mapping[str, float]) -> dict[str, float]:
    """Return the weights scaled so that they add up to 1."""
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def check_mixture(prompts: Sequence[Prompt], weights: Mapping[str, float]) -> None:
    """Raise ValueError unless the weights are of the prompts' sources."""
    try:
        check_weights(weights, list(sources_of(prompts)))
    except ValueError as error:
        raise ValueError(f"{SETTING}: {error}") from error


@dataclass(slots=True)
class MixtureOrder:
    """Which prompt is drawn at each place of the run: a function of the seed and the weights.

    The source that is furthest behind its weight is drawn next (smooth weighted round-robin), so
    that each batch has the sources in proportion; its prompts come in a new permutation each time
    that all of them have been drawn.

    Args:
        sources: numbers of each source's prompts.
        changes: places from which weights hold, in order; the first is 0.
    """

    sources: Mapping[str, Sequence[int]]
    seed: int
    changes: list[tuple[int, dict[str, float]]]
    _num_applied: int = 0  # changes at places that have been drawn
    _shares: dict[str, float] = field(default_factory=dict)
    _drawn: list[int] = field(default_factory=list)
    _credits: dict[str, float] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)
    _orders: dict[str, tuple[int, list[int]]] = field(default_factory=dict)

    def prompt(self, place: int) -> int:
        """Return the number of the prompt at a place of the run."""
        while len(self._drawn) <= place:
            self._draw()
        return self._drawn[place]

    def change(self, weights: Mapping[str, float]) -> None:
        """Let other weights hold for what has not been drawn yet."""
        place = len(self._drawn)
        if self.changes[-1][0] == place:
            self.changes.pop()
        self.changes.append((place, dict(weights)))

    def change_from(self, place: int, weights: Mapping[str, float]) -> None:
        """Let other weights hold from a place on; later changes are dropped."""
        self.changes = [change for change in self.changes if change[0] < place]
        while len(self._drawn) < place:
            self._draw()
        self.changes.append((place, dict(weights)))

    def restore(self, changes: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Draw from the beginning again, with these weights."""
        self.changes = [(int(place), dict(weights)) for place, weights in changes]
        self._num_applied = 0
        for memory in (self._drawn, self._credits, self._counts, self._orders):
            memory.clear()

    def _draw(self) -> None:
        place = len(self._drawn)
        if self._num_applied < len(self.changes) and self.changes[self._num_applied][0] == place:
            self._shares = shares_of(self.changes[self._num_applied][1])
            self._num_applied += 1
            self._credits.clear()  # what a source was behind was behind other weights
        for name, share in self._shares.items():
            self._credits[name] = self._credits.get(name, 0.0) + share
        drawable = [name for name in self.sources if self._shares[name] > 0]
        source = max(drawable, key=self._credits.__getitem__)
        self._credits[source] -= 1.0
        number = self._counts.get(source, 0)
        self._counts[source] = number + 1
        self._drawn.append(self._prompt_of(source, number))

    def _prompt_of(self, source: str, number: int) -> int:
        """Return the prompt that is drawn as the source's `number`-th."""
        prompts = self.sources[source]
        turn, place = divmod(number, len(prompts))
        if self._orders.get(source, (-1, []))[0] != turn:
            position = list(self.sources).index(source)
            key = (self.seed * 1_000_003 + turn) * 1_009 + position
            generator = torch.Generator().manual_seed(key)
            order = torch.randperm(len(prompts), generator=generator).tolist()
            self._orders[source] = (turn, order)
        return prompts[self._orders[source][1][place]]


class MixtureSampler(PromptSampler):
    """A `PromptSampler` of several sources. An epoch draws as many prompts as there are.

    Copies share the order: weights that change, change for all of them.

    Example:
        >>> sampler = MixtureSampler(
        ...     {"easy": [0, 1], "hard": [2, 3, 4, 5]},
        ...     {"easy": 1, "hard": 1},
        ...     batch_size=2,
        ...     seed=0,
        ... )
        >>> [number < 2 for number in sampler.next_batch() + sampler.next_batch()]
        [True, False, True, False]
    """

    def __init__(
        self,
        sources: Mapping[str, Sequence[int]],
        weights: Mapping[str, float],
        *,
        batch_size: int,
        seed: int,
        digest: str | None = None,
    ) -> None:
        self._chosen = check_weights(weights, list(sources))
        self.mixture = MixtureOrder(sources, seed, [(0, self._chosen)])
        number = sum(len(prompts) for prompts in sources.values())
        super().__init__(number, batch_size=batch_size, seed=seed, digest=digest)

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the sources for what is drawn next, which add up to 1."""
        return shares_of(self.mixture.changes[-1][1])

    def follow(
        self,
        curriculum: Curriculum,
        step: int,
        statistics: Mapping[str, Mapping[str, float]],
    ) -> None:
        """Ask the curriculum for weights after a step.

        Raises:
            CurriculumError: it raised, or returned something else than weights of the sources.
        """
        try:
            weights = curriculum(step, statistics)
        except Exception as error:
            raise CurriculumError(
                f"{CURRICULUM}: raised {type(error).__name__} after step {step}: {error}"
            ) from error
        if weights is None:
            return
        try:
            checked = check_weights(weights, list(self.mixture.sources))
        except ValueError as error:
            raise CurriculumError(f"{CURRICULUM}: after step {step}: {error}") from error
        if checked != self.mixture.changes[-1][1]:
            self.mixture.change(checked)

    def state(self) -> dict[str, Any]:
        return {
            **super().state(),
            "mixture": self.mixture.changes,
            "mixture_setting": self._chosen,
        }

    def restore(self, state: dict[str, Any]) -> None:
        changes = state.get("mixture")
        if changes is None:
            raise ValueError(
                f"resume: the checkpoint was made without {SETTING}: the data order would differ"
            )
        before = ", ".join(sorted(changes[0][1]))
        now = ", ".join(sorted(self.mixture.sources))
        if before != now:
            raise ValueError(
                f"resume: the checkpoint was made with the sources {before}, this run has {now}: "
                "the data order would differ"
            )
        super().restore(state)
        self.mixture.restore(changes)
        # The setting that the saved run had, not its first weights: a change applies once.
        if self._chosen != state["mixture_setting"]:
            logger.warning(
                "resume: %s differs from the checkpoint's and applies from here", SETTING
            )
            place = self.epoch * self.prompts_per_epoch + self.position
            self.mixture.change_from(place, self._chosen)

    def _prompt_at(self, epoch: int, position: int) -> int:
        return self.mixture.prompt(epoch * self.prompts_per_epoch + position)


def make_sampler(
    prompts: Sequence[Prompt],
    weights: Mapping[str, float],
    *,
    batch_size: int,
    seed: int,
    digest: str | None = None,
) -> PromptSampler:
    """Return the order of the prompts: mixed by weights, or without these each once an epoch."""
    if not weights:
        return PromptSampler(len(prompts), batch_size=batch_size, seed=seed, digest=digest)
    return MixtureSampler(
        sources_of(prompts), weights, batch_size=batch_size, seed=seed, digest=digest
    )


def load_curriculum(name: str | None) -> Curriculum | None:
    """Return the function of `data.curriculum`; ValueError if there is none of this name."""
    curriculum: Curriculum | None = load_setting_function(CURRICULUM, name)
    return curriculum

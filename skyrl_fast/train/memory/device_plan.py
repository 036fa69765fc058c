"""The result of a memory plan: parts of each device, their sums, and how they are printed."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Item:
    """One part of a device's memory."""

    name: str
    num_bytes: int
    settings: tuple[str, ...] = ()  # names of those that change it


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The memory of one GPU, or main memory, at its peak or at that of a phase."""

    name: str  # such as "GPU 0", "GPU 0, update" or "main memory"
    items: tuple[Item, ...]
    capacity: int  # bytes

    @property
    def total(self) -> int:
        """Bytes needed."""
        return sum(item.num_bytes for item in self.items)

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity

    def __str__(self) -> str:
        lines = [f"{self.name}: {gib(self.total)} of {gib(self.capacity)} GiB"]
        for item in self.items:
            if item.settings:
                by = f"  ({', '.join(item.settings)})"
            else:
                by = ""
            lines.append(f"  {gib(item.num_bytes):>8} GiB  {item.name}{by}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Remedies:
    """Settings with which a run would fit, each as words of a command line.

    Args:
        settings: that change neither what is trained nor its rows: each alone, else together.
        by_lora: the same with an adapter in place of all weights.
        shorter: with shorter rows, looked for where neither of these fits.
        tried: names of what was changed.
        nearest: the combination that lacks least, where none fits.
        lacking_bytes: on its fullest device.
    """

    settings: tuple[str, ...] = ()
    by_lora: tuple[str, ...] = ()
    shorter: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()
    nearest: str = ""
    lacking_bytes: int = 0

    @property
    def proposals(self) -> tuple[str, ...]:
        """All that fits, what changes least first."""
        return self.settings + self.by_lora + self.shorter

    def __str__(self) -> str:
        groups = {
            "it would fit with:": self.settings,
            "it would fit by LoRA, in place of all weights, with:": self.by_lora,
            "it would fit with shorter rows:": self.shorter,
        }
        lines = []
        for title, found in groups.items():
            if found:
                lines += [title, *(f"  {one}" for one in found)]
        if not lines:
            lines = [
                f"nothing fits; tried: {', '.join(self.tried)}",
                f"the nearest lacks {gib(self.lacking_bytes)} GiB: {self.nearest or 'as it is'}",
            ]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of a run.

    Args:
        devices: main memory, or the GPUs, those of a kind as one; a GPU whose engine sleeps during
            updates twice, as either the update or generation needs more.
        engine_share: `gpu_memory_utilization` of the run's own engine; None: there is none.
        host_bytes: main memory for handing over the weights, for those of sleeping engines, and for
            the policy's moments and all weights where they are offloaded.
        held_gradient_bytes: of full gradients, where what an update leaves holds them: they are
            reduced over the ranks once in an optimizer step, else in every micro-batch. 0 with one
            rank.
        saved_logits_bytes: of logits that fit into the rest of it; saving them for the backward
            pass spares a product.
        remedies: settings with which the run would fit; None where it fits, or none were looked
            for.
        offloads_moments: whether it fits only as moments are in main memory between steps, which
            the settings leave open.
        offloads_weights: whether it fits only as weights are in main memory while engines generate,
            which the settings leave open.
        sends_files: whether it fits only, or lacks less, as weights go to engines by file and not
            by buckets on the ranks' GPUs, which the settings leave open.
        drawing: which GPU holds which rank and engine; "": there is one GPU, or none.
    """

    devices: tuple[DevicePlan, ...]
    engine_share: float | None
    host_bytes: int
    held_gradient_bytes: int = 0
    saved_logits_bytes: int = 0
    remedies: Remedies | None = None
    offloads_moments: bool = False
    offloads_weights: bool = False
    sends_files: bool = False
    drawing: str = ""

    @property
    def fits(self) -> bool:
        return all(device.fits for device in self.devices)

    @property
    def lacking_bytes(self) -> int:
        """Bytes that the fullest device lacks; less than 0 where all fits."""
        return max(device.total - device.capacity for device in self.devices)

    def __str__(self) -> str:
        lines = [str(device) for device in self.devices]
        if self.drawing:
            lines.insert(0, self.drawing)
        if self.host_bytes:
            lines.append(f"main memory: {gib(self.host_bytes)} GiB for what is not on GPUs")
        if self.fits:
            engine = self.engine_share
            if engine is None:
                share = ""
            else:
                share = f"; gpu_memory_utilization={engine:.2f}"
            spare = []
            if self.held_gradient_bytes:
                spare.append(f"{gib(self.held_gradient_bytes)} GiB of gradients to reduce")
            if self.saved_logits_bytes:
                spare.append(f"up to {gib(self.saved_logits_bytes)} GiB of saved logits")
            if self.offloads_moments:
                share += "; AdamW's moments are in main memory between steps"
            if self.offloads_weights:
                share += "; weights are in main memory while the engine generates"
            if spare:
                rest = f"; the rest holds {' and '.join(spare)}"
            else:
                rest = ""
            return "\n".join([*lines, f"fits{share}{rest}"])
        lines += [
            f"does not fit: {device.name} lacks {gib(device.total - device.capacity)} GiB"
            for device in self.devices
            if not device.fits
        ]
        if self.remedies is not None:
            lines.append(str(self.remedies))
        return "\n".join(lines)


def gib(num_bytes: int) -> str:
    """Return bytes as GiB with one decimal."""
    return f"{num_bytes / GIB:,.1f}"

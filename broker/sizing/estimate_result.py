"""`EstimateResult`: the document of `broker.estimate`, which prints as `gpubroker estimate` does."""

from collections.abc import Iterator
from typing import Any

from broker.domain.gpu_names import marketed_gb
from broker.domain.offer import GIB


class EstimateResult(dict[str, Any]):
    """Estimate of a fine-tune: the JSON document of `gpubroker estimate`, with its main figures as properties.

    `print` and a notebook show it in GiB, with its evidence.
    """

    @property
    def peak_gib(self) -> float:
        """Peak of the memory that is allocated on one GPU, in GiB."""
        return float(self["peak_allocated_bytes"]) / GIB

    @property
    def device_gib(self) -> float:
        """Memory of one GPU in nvidia-smi, in GiB."""
        return float(self["device_used_bytes"]) / GIB

    @property
    def fits(self) -> bool | None:
        """True if it fits on the GPU with its margin; None: no GPU was named."""
        fits: bool | None = self["fits"]
        return fits

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second of all GPUs; None: unknown, or it does not fit."""
        rate: float | None = None if self["fits"] is False else self["tokens_per_s"]
        return rate

    def __str__(self) -> str:
        return "\n".join([*(f"note: {note}" for note in self["notes"]), self.heading, *self.sizes, *self.remarks])

    __repr__ = __str__

    @property
    def heading(self) -> str:
        """The model and its parameters in words."""
        sizes = f"{self['parameters'] / 1e6:,.0f} M parameters, {self['trainable_parameters'] / 1e6:,.1f} M trained"
        return f"{self['model']}: {self['family']}, {sizes}"

    @property
    def sizes(self) -> list[str]:
        """The memory by category, as lines of a table."""
        named = {"context": "CUDA context and fragmentation"}
        rows = {named.get(category, category): size for category, size in self["by_category"].items() if size}
        rows |= {"peak allocated": self["peak_allocated_bytes"], "in nvidia-smi": self["device_used_bytes"]}
        texts = {name: f"{size / GIB:.2f} GiB" for name, size in rows.items()}
        left, right = max(map(len, texts)), max(map(len, texts.values()))
        return [f"{name:<{left}}  {text:>{right}}" for name, text in texts.items()]

    @property
    def remarks(self) -> list[str]:
        """The evidence, the fit and the speed in words."""
        return list(self._remarks())

    def _remarks(self) -> Iterator[str]:
        device = f"{self['device_margin_pct']:g} % of the figure in nvidia-smi"
        yield f"peak in: {self['segment']}; margin {self['margin_pct']:g} % of the peak, {device}"
        yield f"evidence: {self['evidence']} ({self['evidence_detail']})"
        yield f"recipe: {self['recipe']}"
        if self["gpu"]:
            words, size = "fits" if self["fits"] else "does not fit", self["gpu_memory_bytes"]
            marketed = marketed_gb(self["gpu"], size)
            yield f"{self['gpu']}: {words} with that margin, of {size / GIB:.1f} GiB (sold as {marketed} GB)"
        if self["fits"] is False:
            yield self._way_out()
            yield from self._changes_table()
        elif self["tokens_per_s"] is None:
            yield f"tokens/s: unknown: {self['tokens_per_s_basis']}"
        else:
            low, high = self["tokens_per_s_interval"]
            text = f"{self['tokens_per_s']:,.0f} ({low:,.0f} – {high:,.0f})"
            yield f"tokens/s: {text}: {self['tokens_per_s_evidence']} ({self['tokens_per_s_basis']})"

    def _changes_table(self) -> Iterator[str]:
        """Yield the table of the smallest changes, each of which fits."""
        rows = [(w["change"], f"{w['device_used_bytes'] / GIB:.1f} GiB", w["options"]) for w in self["ways_to_fit"]]
        head = ("change", "nvidia-smi", "options")
        widths = [max(len(row[i]) for row in (head, *rows)) for i in (0, 1)]
        for change, size, options in (head, *rows) if rows else ():
            yield f"{change:<{widths[0]}}  {size:>{widths[1]}}  {options}"

    def _way_out(self) -> str:
        """Return the options with which it would fit, or other ways to need less."""
        other = self["would_fit"]
        if other is None:
            # `_ways` has tried the other methods of the estimate's own families.
            lighter = "--method lora, " if self["trainable_parameters"] == self["parameters"] else ""
            return f"would fit: nothing found up to 64 GPUs; try {lighter}a shorter --seq or another --gpu"
        options = [f"--gpus {other['gpus']}"] if other["gpus"] > 1 else []
        options += [f"--nodes {other['nodes']}"] if other["nodes"] > 1 else []
        options += [f"--sharding {other['sharding']}"] if other["sharding"] != "none" else []
        options += ["--gradient-checkpointing"] if other["gradient_checkpointing"] else []
        return f"would fit: {' '.join(options)} ({other['device_used_bytes'] / GIB:.1f} GiB a GPU in nvidia-smi)"

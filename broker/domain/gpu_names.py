"""Canonical spelling of GPU names that nvidia-smi, cloud catalogues and users write differently."""

import re
from collections.abc import Mapping

_SIZES: Mapping[str, tuple[int, ...]] = {
    "h100": (80, 94), "h200": (141,), "b200": (180, 192), "a100": (40, 80), "l40s": (45, 46, 48), "rtx4090": (24,),
    "a6000": (48,), "a10g": (22, 24), "l4": (22, 23, 24),
}  # fmt: skip
"""Memory sizes in GB under which each model is sold, or which its driver reports."""
_NOMINAL = ("b200", 192)
"""Memory of the chips, of which clouds sell 180 GB."""
_SIZES_UNLISTED: Mapping[str, tuple[int, ...]] = {"b300": (288,), "mi300x": (192,)}
"""Sizes of further models whose size is not the next multiple of 8. Their names have no canonical form."""
_ALIASES = {"4090": "rtx4090", "rtx4090": "rtx4090", "rtxa6000": "a6000"}
_NOISE = frozenset({
    "nvidia", "geforce", "rtx", "gpu", "tensor", "core", "hbm2", "hbm2e", "hbm3", "hbm3e", "gddr6", "gddr6x",
})  # fmt: skip
"""Words that do not distinguish these products. On an H100 alone, `hbm3` does."""
_FORMS = {"sxm": "sxm", "sxm4": "sxm", "sxm5": "sxm", "sxm6": "sxm", "pci": "pcie", "pcie": "pcie", "nvl": "nvl"}
_BOARDS = frozenset({"h100", "h200", "a100"})
"""Models that are sold on boards of different speed."""


def gpu_name(name: str) -> str:
    """Return the canonical name: `NVIDIA A100-SXM4-80GB` becomes `a100-80gb-sxm`.

    A bare `H100` becomes `h100`, which matches every H100. The name of an unknown product keeps its words, joined by
    hyphens.
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    text = "-".join([word for word in words if word != "nvidia"] or words)
    text = re.sub(r"\bpci-?e(-?xpress)?\b", "pcie", text)
    text = re.sub(r"\b(\d+)-?g(i?b)?\b", r"\1gb", text)
    return _canonical(text.split("-")) or text


def marketed_gb(name: str, memory_bytes: int) -> int:
    """Return the size in GB by which a GPU is sold; its driver reports a little less, in GiB."""
    gib, gb = memory_bytes / 1024**3, memory_bytes / 1000**3
    named = [int(word.removesuffix("gb")) for word in name.split("-") if re.fullmatch(r"\d{1,4}gb", word)]
    model = name.partition("-")[0]
    known = _SIZES.get(model) or _SIZES_UNLISTED.get(model, ())
    sizes = [*named, *(size for size in known if (model, size) != _NOMINAL)]
    matching_sizes = [size for size in sizes if 0.98 * gib <= size <= 1.12 * gib]
    return max(matching_sizes, default=_round_size(gib, gb))


def _round_size(gib: float, gb: float) -> int:
    """Return the multiple of 8 that the driver's size falls short of, if there is one; otherwise the size in GB."""
    above = -(-gib // 8) * 8
    return int(above) if above - gib <= 0.07 * above else round(gb)


def _canonical(words: list[str]) -> str | None:
    """Return the canonical name, or None if a word is unknown: a slice or a reduced board is another product."""
    models = [_ALIASES.get(word, word) for word in words if _ALIASES.get(word, word) in _SIZES]
    sizes = [int(word.removesuffix("gb")) for word in words if re.fullmatch(r"\d{1,4}gb", word)]
    forms = [_FORMS[word] for word in words if word in _FORMS]
    understood = len(models) + len(sizes) + len(forms) + sum(word in _NOISE for word in words)
    if len(models) != 1 or len(sizes) > 1 or len(forms) > 1 or understood != len(words):
        return None
    model, form = models[0], forms[0] if forms else "sxm" if models == ["h100"] and "hbm3" in words else ""
    if not set(sizes) <= set(_SIZES[model]):
        return None
    if model not in _BOARDS:
        return None if form == ("pcie" if model == "b200" else "sxm") else model
    size = sizes[0] if sizes else 0
    if model == "a100":  # the table's name of the 40 GB SXM board has no form
        parts = [model, f"{size}gb" if size else "", "" if (size, form) == (40, "sxm") else form]
    else:
        # without a form, 80 GB excludes the NVL board and leaves SXM and PCIe
        memory = f"{size}gb" if model == "h100" and size and not form else ""
        parts = [model, "nvl" if size == 94 else form or memory]
    return "-".join(part for part in parts if part)

"""Differences between versions of transformers: loss, attention keys, checkpointing, experts, rotary tables."""

import re
from typing import Literal

from broker.domain.workload import ModelShape
from broker.estimator.memory.simulator.loss_forms import (
    TRAINER_LOSS,
    FloatLoss,
    LossForm,
    OwnTypeLoss,
    PaddedLoss,
    ShiftedLoss,
)

CHECKED = (4, 45), (4, 57)
"""First and last release of 4.x whose code was checked; those between, except 4.49, 4.51 and 4.56, were checked too."""
TRAINER_RELEASES = (5, 17), (5, 24)
"""Former and present release of transformers that the trainer uses; the simulator follows their code."""
SHARED_BY_SDPA = 4, 54
"""First release that passes grouped keys (fewer heads than queries) to torch's attention without repeating them."""
OWN_TYPE_LOSS = frozenset({"falcon", "gpt_neox", "gpt2", "gpt_bigcode"})
"""Families whose models computed their loss in the data type of the logits before transformers 4.49."""
COMMON_LOSS = {"mistral": (4, 47), "starcoder2": (4, 47), "granite": (4, 48)}
"""Release in which a family adopted transformers' common loss; all other families adopted that loss in 4.46."""
REPEATED_FOR_FLASH = frozenset({"mistral", "mixtral", "qwen2", "phi3", "starcoder2"})
"""Families that repeated grouped keys for flash attention too, before all families got a common attention in 4.48."""
CAPPED_SCORES = frozenset({"gemma2"})
"""Families that cap attention scores. torch's attention cannot, so releases after 5.17 refuse sdpa for them."""
OWN_SDPA = frozenset({"falcon", "gpt_bigcode", "gpt_neox", "gpt2"})
"""Families without grouped keys, or whose attention code shares grouped keys in a way of its own."""

PRESENTS_UNTIL = {"gpt_bigcode": (4, 53)}
"""First release in which a family no longer returns its keys for generation under checkpointing."""


VERSION = r"(\d{1,4})\.(\d{1,4})(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[a-z0-9.]+)?"
"""Pattern of a PEP 440 version; a pre-release is treated as its release."""


def release_of(version: str | None) -> tuple[int, int] | None:
    """Return (major, minor) of the version; None: the trainer's own. Raise ValueError for an invalid version."""
    if version is None:
        return None
    match = re.fullmatch(VERSION, version, re.ASCII)
    if not match:
        raise ValueError(f"{version}: not a version such as 4.48.1")
    return int(match[1]), int(match[2])


def loss_of(family: str, release: tuple[int, int] | None) -> LossForm:
    """Return the form of the family's loss in `release`; `release` None: the trainer's own loss."""
    if release is None:
        return TRAINER_LOSS
    if release >= (4, 49):
        return PaddedLoss()
    if family in OWN_TYPE_LOSS:
        return OwnTypeLoss()
    return ShiftedLoss() if release >= COMMON_LOSS.get(family, (4, 46)) else FloatLoss()


def is_version_4(release: tuple[int, int] | None) -> bool:
    """Return True for 4.x, where checkpointing is reentrant by default and experts are computed one after the other."""
    return release is not None and release[0] == 4


def repeats_keys(family: str, release: tuple[int, int] | None, attention: str) -> bool:
    """Return True if grouped keys and values are repeated before a kernel that accepts them unrepeated."""
    if release is None or not is_version_4(release) or family in OWN_SDPA:
        return False
    if attention == "flash":
        return release < (4, 48) and family in REPEATED_FOR_FLASH
    return attention == "sdpa" and release < SHARED_BY_SDPA


def attention_of(
    family: str, release: tuple[int, int] | None, attention: Literal["sdpa", "flash", "eager"]
) -> Literal["sdpa", "flash", "eager"]:
    """Return the attention that the model runs if `attention` is requested: eager if transformers refuses sdpa."""
    refused = family in CAPPED_SCORES and (release is None or release > TRAINER_RELEASES[0])
    return "eager" if refused and attention == "sdpa" else attention


def keeps_presents(family: str, release: tuple[int, int] | None, *, checkpointing: bool) -> bool:
    """Return True if checkpointed layers also return their keys for generation. Most families never do."""
    return checkpointing and release is not None and release < PRESENTS_UNTIL.get(family, (0, 0))


def is_quantised(family: str, release: tuple[int, int] | None) -> bool:
    """Return True if bitsandbytes' modules replace the family's linear modules.

    Since 5.0 transformers replaces instances of `nn.Linear` only, not of subclasses such as Falcon's.
    """
    return family != "falcon" or is_version_4(release)


def table_bytes(shape: ModelShape, release: tuple[int, int] | None, width: int) -> int:
    """Return the bytes of the cosine and sine tables that layers hold: in Mixtral before 4.48, otherwise 0.

    Each layer held tables for all positions. `width`: bytes of a weight.
    """
    if shape.family != "mixtral" or release is None or release >= (4, 48):
        return 0
    return 2 * shape.layers * (shape.max_positions or 0) * shape.head_dim * width


def is_checked(release: tuple[int, int] | None) -> bool:
    """Return True if the simulator was checked against the code of `release`; None: the trainer's release."""
    return release is None or CHECKED[0] <= release <= CHECKED[1] or release in TRAINER_RELEASES


CHECKED_MESSAGE = "4.45 to 4.57, 5.17 and 5.24 were"
"""End of the sentence `transformers <version> was not checked: ...`."""
UNCHECKED_MARGIN = 0.10
"""Additional margin for a release that was never checked: 4.45 and 4.48 differ by up to 11 % on the same model."""

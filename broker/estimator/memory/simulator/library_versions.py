"""Differences between versions of transformers: loss, keys of attention, checkpointing, experts, tables."""

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

READ = (4, 45), (4, 57)
"""First and last checked release of 4.x. The checked ones are 4.45 to 4.48, 4.50, 4.52 to 4.55 and 4.57."""
OWN = (5, 17), (5, 24)
"""Former and present release of the trainer, whose code the simulator follows."""
SHARED_BY_SDPA = 4, 54
"""First release that gives torch's attention keys with fewer heads unrepeated."""
OWN_LOSS = frozenset({"falcon", "gpt_neox", "gpt2", "gpt_bigcode"})
"""Families whose models computed their loss in the logits' own type until transformers 4.49."""
COMMON_LOSS = {"mistral": (4, 47), "starcoder2": (4, 47), "granite": (4, 48)}
"""Families that adopted transformers' common loss later than 4.46, and the release."""
REPEATED_FOR_FLASH = frozenset({"mistral", "mixtral", "qwen2", "phi3", "starcoder2"})
"""Families that also repeated keys for flash attention, until all families got a common attention in 4.48."""
CAPPED_SCORES = frozenset({"gemma2"})
"""Families that cap the scores of attention, which torch's attention cannot. Releases after 5.17 refuse it for them."""
OWN_SDPA = frozenset({"falcon", "gpt_bigcode", "gpt_neox", "gpt2"})
"""Families whose attention handles keys with fewer heads in its own way, or has none."""

PRESENTS_UNTIL = {"gpt_bigcode": (4, 53)}
"""Families that kept their keys for generation under checkpointing too, and the release that stopped this."""


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
    """Return the form of the loss that the family has in that release; None: the trainer's."""
    if release is None:
        return TRAINER_LOSS
    if release >= (4, 49):
        return PaddedLoss()
    if family in OWN_LOSS:
        return OwnTypeLoss()
    return ShiftedLoss() if release >= COMMON_LOSS.get(family, (4, 46)) else FloatLoss()


def is_fourth(release: tuple[int, int] | None) -> bool:
    """Return whether the release is 4.x: checkpointing is reentrant by default, and experts are computed in turn."""
    return release is not None and release[0] == 4


def repeats_keys(family: str, release: tuple[int, int] | None, attention: str) -> bool:
    """Return whether keys and values are repeated before a kernel that could share them."""
    if release is None or not is_fourth(release) or family in OWN_SDPA:
        return False
    if attention == "flash":
        return release < (4, 48) and family in REPEATED_FOR_FLASH
    return attention == "sdpa" and release < SHARED_BY_SDPA


def attention_of(
    family: str, release: tuple[int, int] | None, attention: Literal["sdpa", "flash", "eager"]
) -> Literal["sdpa", "flash", "eager"]:
    """Return the attention that the model runs if `attention` is wanted: its own if the family has no sdpa."""
    refused = family in CAPPED_SCORES and (release is None or release > OWN[0])
    return "eager" if refused and attention == "sdpa" else attention


def keeps_presents(family: str, release: tuple[int, int] | None, *, checkpointing: bool) -> bool:
    """Return whether checkpointed layers return their keys for generation; other families switch that off."""
    return checkpointing and release is not None and release < PRESENTS_UNTIL.get(family, (0, 0))


def is_quantised(family: str, release: tuple[int, int] | None) -> bool:
    """Return whether bitsandbytes' modules replace the family's linear modules.

    Since 5.0 transformers replaces only linear modules themselves, not their subclasses, which Falcon uses.
    """
    return family != "falcon" or is_fourth(release)


def table_bytes(shape: ModelShape, release: tuple[int, int] | None, width: int) -> int:
    """Return the bytes of cosine and sine tables of all positions, in the width of the weights.

    Until 4.48 each layer of a Mixtral held them.
    """
    if shape.family != "mixtral" or release is None or release >= (4, 48):
        return 0
    return 2 * shape.layers * (shape.max_positions or 0) * shape.head_dim * width


def is_read(release: tuple[int, int] | None) -> bool:
    """Return whether that release's code was checked against the simulator, or is the trainer's."""
    return release is None or READ[0] <= release <= READ[1] or release in OWN


READ_WORDS = "4.45 to 4.57, 5.17 and 5.24 were"
UNREAD = 0.10
"""Additional margin for a release that was never checked: 4.45 and 4.48 differ by up to 11 % on the same model."""

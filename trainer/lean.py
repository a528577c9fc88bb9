"""Makes libraries look absent that others import whenever they are there, and that a process will not use."""

import sys

UNUSED = ("bitsandbytes", "datasets", "pandas", "scipy", "sklearn", "tensorboard", "torchaudio", "torchvision")
"""Of transformers, peft and accelerate; importing them took 2.6 of 7 s."""


def shut_out() -> None:
    """Before the first import of these; for the rest of the process."""
    for name in UNUSED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # which import reads as: not to be had

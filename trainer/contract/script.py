"""`ScriptConfig`: the user's own program, run by the same agent with the same beats, drain and caps."""

from typing import Annotated

from pydantic import Field

from trainer.contract.base import Config, Text


class ScriptConfig(Config):
    """A folder or archive and an argv list, never a shell string.

    What the program writes to `$GPUBROKER_CHECKPOINT_DIR` is committed and restored before the next start. On several
    machines the first one's is, on all of them: what the others write there is not saved.
    """

    code: Annotated[Text, Field(min_length=1, max_length=1024)]
    """A folder (packed by the CLI) or `upload:<sha256>` of a .tar for the API."""
    command: Annotated[tuple[Annotated[Text, Field(max_length=8192)], ...], Field(min_length=1, max_length=256)]
    """For example `[python, train.py, --lr, "1e-4"]`."""
    checkpoints: bool = True
    """No: it writes none, so nothing of it survives a preemption, and no spot machine is bought for it."""

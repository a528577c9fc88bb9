"""What is done about a machine that bills and does nothing; part of a job's spec and of a team's policy."""

from typing import Annotated, Literal

from pydantic import Field

from trainer.contract.base import Config

IdleAction = Literal["notify", "drain", "end"]
"""Tell people; checkpoint and end; or end at once."""
IdleKind = Literal["gpu", "no_progress", "download"]
"""GPUs that do nothing; no new step; set-up that stands still."""

Window = Annotated[int, Field(ge=60, le=604_800)]


class IdlePolicy(Config):
    """When a machine counts as idle, and what follows. Progress of the trainer itself overrules an idle GPU."""

    action: IdleAction = "notify"
    """For idle GPUs and missing progress: `notify`, `drain` (checkpoint, then end) or `end`; the job fails then."""
    gpu_below: Annotated[float, Field(ge=0, le=1)] = 0.05
    """A GPU that is used less than this is idle; 0 never."""
    window_s: Window = 900
    """Seconds for which every sample must say so, while no step and no checkpoint is finished."""
    no_progress_s: Window = 1500
    """Seconds without a new step, once there was one; the daemon itself ends what is stuck for 1800."""
    download_action: IdleAction = "end"
    """For set-up that stands still (model, data, imports); `end` lets the job go on elsewhere, as `retry` allows."""
    download_s: Window = 1800
    """Seconds of set-up in which nearly nothing was received and nothing was said."""


def idle_policy(own: IdlePolicy | None, of_team: IdlePolicy | None) -> IdlePolicy:
    """The job's own counts, then its team's, then the defaults."""
    return own or of_team or IdlePolicy()

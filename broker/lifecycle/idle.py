"""Detects idle machines.

Each heartbeat updates one `IdleWatch`, so a window of any length needs constant memory.
"""

from dataclasses import dataclass

from broker.domain.job import Signal
from broker.domain.spec import IdleAction, IdleKind, IdlePolicy
from trainer.contract.documents import Heartbeat

MIN_SAMPLES = 5
"""Minimum number of samples that prove idleness. Fewer samples may all lie between two kernels."""
MIN_BYTES = 10 << 20
"""Received bytes that count as activity. The agent's own polls of the blob store receive less within `download_s`."""
SETUP = frozenset({"starting", "loading"})
ENDING = frozenset({"draining", "done"})
LIMITED = frozenset({"setup"})
"""Phases whose time the agent limits, by `script.setup_timeout_s`: neither idle nor stuck."""


@dataclass(frozen=True, kw_only=True)
class IdleWatch:
    """Activity of a machine since the latest start of its agent. Times are the watcher's monotonic seconds."""

    beat: Heartbeat
    """The latest heartbeat."""
    at_s: float
    """Time at which `beat` was read."""
    step_s: float
    """Time at which a step or checkpoint was last observed to finish."""
    idle_since_s: float | None = None
    """Time since which all samples show unused GPUs; None: the latest sample does not."""
    idle_samples: int = 0
    """Number of samples since `idle_since_s`."""
    active_s: float
    """Time at which set-up last reported or received something."""
    active_bytes: int
    """Bytes that the machine had received by `active_s`."""


@dataclass(frozen=True, kw_only=True)
class Idle:
    """Kind of idleness, with the configured action."""

    kind: IdleKind
    action: IdleAction
    message: str
    """One line for users."""


def next_watch(watched: IdleWatch | None, beat: Heartbeat, at_s: float, policy: IdlePolicy) -> IdleWatch:
    """Return `watched` updated by a heartbeat; a repeated heartbeat changes nothing."""
    if watched is None or watched.beat.boot != beat.boot:
        idle = _is_unused(beat, policy)
        return IdleWatch(
            beat=beat,
            at_s=at_s,
            step_s=at_s,
            idle_since_s=at_s if idle else None,
            idle_samples=int(idle),
            active_s=at_s,
            active_bytes=beat.network_bytes or 0,
        )
    if watched.beat.seq == beat.seq:
        return watched
    idle, active = _is_unused(beat, policy), _is_active(watched, beat)
    return IdleWatch(
        beat=beat,
        at_s=at_s,
        step_s=watched.step_s if _progress(watched.beat) == _progress(beat) else at_s,
        idle_since_s=(at_s if watched.idle_since_s is None else watched.idle_since_s) if idle else None,
        idle_samples=watched.idle_samples + 1 if idle else 0,
        active_s=at_s if active else watched.active_s,
        active_bytes=(beat.network_bytes or 0) if active else watched.active_bytes,
    )


def _is_unused(beat: Heartbeat, policy: IdlePolicy) -> bool:
    used = beat.gpu_utilisation
    return used is not None and used < policy.gpu_below and beat.phase not in LIMITED


def _progress(beat: Heartbeat) -> tuple[int, int]:
    return beat.step, beat.checkpoint.step if beat.checkpoint else 0


def _is_active(watched: IdleWatch, beat: Heartbeat) -> bool:
    """Return True if set-up reported progress or received data.

    If the machine reports no received bytes, only the reported progress counts.
    """
    has_changed = (watched.beat.phase, watched.beat.message, watched.beat.step) != (beat.phase, beat.message, beat.step)
    return has_changed or (beat.network_bytes or 0) - watched.active_bytes >= MIN_BYTES


def judge_idle(watched: IdleWatch, policy: IdlePolicy) -> Idle | None:
    """Return the idleness that the samples prove; None: the machine works, or may work."""
    beat, at_s = watched.beat, watched.at_s
    if beat.phase in ENDING:
        return None
    if beat.phase in SETUP:
        still_s = at_s - watched.active_s
        if still_s < policy.download_s:
            return None
        message = f"set-up has made no progress for {still_s / 60:.0f} min ({beat.message or beat.phase})"
        return Idle(kind="download", action=policy.download_action, message=message)
    still_s = at_s - watched.step_s
    if beat.step and beat.total_steps and beat.phase == "training" and still_s >= policy.no_progress_s:
        message = f"no step for {still_s / 60:.0f} min, at step {beat.step} of {beat.total_steps}"
        return Idle(kind="no_progress", action=policy.action, message=message)
    since_s = watched.idle_since_s
    enough = since_s is not None and at_s - since_s >= policy.window_s and watched.idle_samples >= MIN_SAMPLES
    if not enough or still_s < policy.window_s:
        return None
    message = (
        f"its GPUs were used less than {policy.gpu_below:.0%} in each of {watched.idle_samples} samples, and nothing "
        f"was finished, for {policy.window_s / 60:.0f} min"
    )
    return Idle(kind="gpu", action=policy.action, message=message)


def idle_signal(idle: Idle) -> Signal | None:
    """Return the signal to raise; None: users are only notified.

    Set-up without progress is a fault of the machine or its network, so its job continues elsewhere.
    """
    if idle.action == "notify":
        return None
    if idle.kind == "download":
        return Signal.HUNG
    return Signal.IDLE if idle.action == "drain" else Signal.IDLE_NOW

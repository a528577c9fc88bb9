"""Does a machine that bills do anything? Folded beat by beat, so that a window of any length costs nothing to keep."""

from dataclasses import dataclass

from broker.domain.job import Signal
from broker.domain.spec import IdleAction, IdleKind, IdlePolicy
from trainer.contract.documents import Beat

LEAST_SAMPLES = 5
"""One look at a GPU between two kernels says nothing."""
LEAST_BYTES = 10 << 20
"""Less than this in the whole of `download_s` is what the agent's own looks at the store receive."""
SETUP = frozenset({"starting", "loading"})
OVER = frozenset({"draining", "done"})


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What is remembered of one start of an agent; times are the watcher's own monotonic seconds."""

    beat: Beat
    """The latest."""
    at_s: float
    step_s: float
    """When a step or a checkpoint was last seen to be finished."""
    idle_since_s: float | None = None
    """Every sample since then says that the GPUs do nothing; None: the last one does not."""
    idle_samples: int = 0
    moved_s: float
    """When set-up last said or received something."""
    moved_bytes: int


@dataclass(frozen=True, kw_only=True)
class Idle:
    kind: IdleKind
    action: IdleAction
    message: str
    """One line for people."""


def watch(known: Watched | None, beat: Beat, at_s: float, policy: IdlePolicy) -> Watched:
    """`known` with another sample; the same beat again is none."""
    if known is None or known.beat.boot != beat.boot:
        idle = _does_nothing(beat, policy)
        return Watched(
            beat=beat,
            at_s=at_s,
            step_s=at_s,
            idle_since_s=at_s if idle else None,
            idle_samples=int(idle),
            moved_s=at_s,
            moved_bytes=beat.network_bytes or 0,
        )
    if known.beat.seq == beat.seq:
        return known
    idle, moved = _does_nothing(beat, policy), _moved(known, beat)
    return Watched(
        beat=beat,
        at_s=at_s,
        step_s=known.step_s if _progress(known.beat) == _progress(beat) else at_s,
        idle_since_s=(at_s if known.idle_since_s is None else known.idle_since_s) if idle else None,
        idle_samples=known.idle_samples + 1 if idle else 0,
        moved_s=at_s if moved else known.moved_s,
        moved_bytes=(beat.network_bytes or 0) if moved else known.moved_bytes,
    )


def _does_nothing(beat: Beat, policy: IdlePolicy) -> bool:
    return beat.gpu_utilisation is not None and beat.gpu_utilisation < policy.gpu_below


def _progress(beat: Beat) -> tuple[int, int]:
    return beat.step, beat.checkpoint.step if beat.checkpoint else 0


def _moved(known: Watched, beat: Beat) -> bool:
    """Where the system counts nothing, set-up is judged by what it says alone."""
    said = (known.beat.phase, known.beat.message, known.beat.step) != (beat.phase, beat.message, beat.step)
    return said or (beat.network_bytes or 0) - known.moved_bytes >= LEAST_BYTES


def judge_idle(watched: Watched, policy: IdlePolicy) -> Idle | None:
    """What the samples so far amount to; None: it works, or may."""
    beat, at_s = watched.beat, watched.at_s
    if beat.phase in OVER:
        return None
    if beat.phase in SETUP:
        still_s = at_s - watched.moved_s
        if still_s < policy.download_s:
            return None
        message = f"set-up has stood still for {still_s / 60:.0f} min ({beat.message or beat.phase})"
        return Idle(kind="download", action=policy.download_action, message=message)
    still_s = at_s - watched.step_s
    if beat.step and beat.total_steps and beat.phase == "training" and still_s >= policy.no_progress_s:
        message = f"no step for {still_s / 60:.0f} min, at step {beat.step} of {beat.total_steps}"
        return Idle(kind="no_progress", action=policy.action, message=message)
    since_s = watched.idle_since_s
    enough = since_s is not None and at_s - since_s >= policy.window_s and watched.idle_samples >= LEAST_SAMPLES
    if not enough or still_s < policy.window_s:
        return None
    message = (
        f"its GPUs were used less than {policy.gpu_below:.0%} in each of {watched.idle_samples} samples, and nothing "
        f"was finished, for {policy.window_s / 60:.0f} min"
    )
    return Idle(kind="gpu", action=policy.action, message=message)


def idle_signal(found: Idle) -> Signal | None:
    """What is raised for it; None: people are told, and that is all. A set-up that stands still is the machine's fault
    or its network's, so its job goes on elsewhere.
    """
    if found.action == "notify":
        return None
    if found.kind == "download":
        return Signal.HUNG
    return Signal.IDLE if found.action == "drain" else Signal.IDLE_NOW

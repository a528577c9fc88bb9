"""Checkpoints kept in addition to the newest: the trainer prunes while a job runs, the broker while it is idle."""

from collections.abc import Iterable

from trainer.contract import object_keys as keys


def milestones(checkpoints: Iterable[str], every: int | None) -> frozenset[str]:
    """Return the manifests of the first checkpoint at or after each multiple of `every` steps.

    `every` None returns none. Since the first checkpoint of each interval stays, pruning other checkpoints does not
    change the result.
    """
    if every is None:
        return frozenset()
    first: dict[int, tuple[int, str]] = {}
    for key in keys.manifests(checkpoints):
        step = keys.step_of(key)
        stretch = step // every
        if stretch:
            first[stretch] = min(first.get(stretch, (step, key)), (step, key))
    return frozenset(key for _, key in first.values())

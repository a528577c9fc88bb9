"""Which checkpoints stay besides the newest: the trainer prunes by it while a job runs, the broker when it rests."""

from collections.abc import Iterable

from trainer.contract import object_keys as keys


def milestones(checkpoints: Iterable[str], every: int | None) -> frozenset[str]:
    """Of a job's keys the manifest of the first checkpoint at or after each multiple of `every` steps; None: no one.

    As the first of each stretch stays, the answer is the same after whatever else has gone.
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

"""The order of the offers that were kept."""

from collections.abc import Sequence
from itertools import compress, groupby, islice
from operator import eq

from broker.domain.offer import Offer


def rank(kept: list[int], keys: Sequence[float], offers: Sequence[Offer]) -> list[int]:
    """Offer numbers by key, ties by offer id; sorting numbers first and the few ties after is the fast way."""
    ranked = sorted(kept, key=keys.__getitem__)
    costs = list(map(keys.__getitem__, ranked))
    same = compress(range(len(costs)), map(eq, costs, islice(costs, 1, None)))
    for _, run in groupby(enumerate(same), key=lambda at: at[1] - at[0]):
        places = [place for _, place in run]
        tie = slice(places[0], places[-1] + 2)
        ranked[tie] = sorted(ranked[tie], key=lambda number: offers[number].id)
    return ranked

"""Timelines of spot markets from recorded offers, refused creates and own machines. See `spot_hazards`.

Where observations differ, own machines count most, then preemptions, refused creates and listed offers. A time without
observations is unknown: neither available nor sold out.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from broker.domain.market.offer_history import BUCKET_S, HistoryRun, MarketGroup
from broker.domain.market.spot_evidence import OwnSpotRun, SpotEvidence
from broker.estimator.spot_hazards import Market, Timeline

BUCKET_MIN: Final = BUCKET_S / 60
"""Minutes of a bucket, and those for which a preemption or a refused create shows that there was no capacity."""
CURRENT_MIN: Final = 30.0
"""Age up to which the latest observation counts as the current state: evidence is read every ten minutes."""
MAX_CHANGES: Final = 400
"""Maximum number of changes of a timeline, the latest ones."""
MAX_MARKETS: Final = 4000
"""Maximum number of timelines, those with the most changes."""
MIN_AVAILABLE_PERCENT: Final = 50
"""Minimum percentage of polls with an offer for sale at which a bucket counts as available."""
_LISTED, _REFUSED, _PREEMPTED, _RUNNING = range(4)
"""Ranks of observations; a higher one counts where several differ."""


class _Span(NamedTuple):
    """Minutes for which an observation shows the state of a market."""

    begin: float
    end: float
    rank: int
    is_up: bool


def timelines(evidence: SpotEvidence, now_min: float) -> Iterator[tuple[Market, Timeline]]:
    """Yield the timeline of each market of which anything is known, each in about a millisecond."""
    recorded, own = evidence.recorded, defaultdict[MarketGroup, dict[int, list[_Span]]](lambda: {1: []})
    for run in evidence.runs:
        spans = own[run.group].setdefault(run.nodes, [])
        spans += _own(run)
    for group in sorted({*own, *(group for group in (*recorded.refused, *recorded.runs) if group.spot)}):
        refused = [
            _Span(bucket * BUCKET_MIN, (bucket + 1) * BUCKET_MIN, _REFUSED, False)
            for bucket in recorded.refused.get(group, ())
        ]
        listed = _listed(recorded.runs.get(group, ()), recorded.listed.get(group.provider, ()))
        for nodes, spans in own[group].items():
            known_spans = [*spans, *refused, *(listed if nodes == 1 else ())]
            if known_spans:
                yield (*group[:5], nodes), _timeline(known_spans, now_min)


def bounded(lines: Mapping[Market, Timeline]) -> Mapping[Market, Timeline]:
    """Return at most `MAX_MARKETS` timelines."""
    if len(lines) <= MAX_MARKETS:
        return lines
    longest = sorted(lines, key=lambda market: len(lines[market]), reverse=True)[:MAX_MARKETS]
    return {market: lines[market] for market in longest}


def _own(run: OwnSpotRun) -> Iterable[_Span]:
    begin, end = run.span_min
    yield _Span(begin, end, _RUNNING, True)
    if run.is_preempted:
        yield _Span(end, end + BUCKET_MIN, _PREEMPTED, False)


def _listed(runs: Sequence[HistoryRun], listed: Sequence[HistoryRun]) -> list[_Span]:
    """Return the states that listings show; none if the cloud lists the offer always and reports no capacity."""
    if not runs:
        return []
    first, is_known = min(run.start for run in runs), any(run.available is not None for run in runs)
    sold_spans = sorted((run.start, run.end) for run in runs)
    gaps = [gap for run in listed for gap in _uncovered(max(first, run.start), run.end, sold_spans)]
    if not (is_known or gaps):
        return []
    up = [(run.start, run.end, run.available is None or run.available >= MIN_AVAILABLE_PERCENT) for run in runs]
    down = [(begin, end, False) for begin, end in gaps]
    return [_Span(begin * BUCKET_MIN, end * BUCKET_MIN, _LISTED, is_up) for begin, end, is_up in (*up, *down)]


def _uncovered(begin: int, end: int, sold_spans: Sequence[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """Yield the parts of an interval that no interval of `sold_spans` covers."""
    for start, stop in sold_spans:
        if begin < min(start, end):
            yield begin, min(start, end)
        begin = max(begin, stop)
    if begin < end:
        yield begin, end


def _timeline(spans: Sequence[_Span], now_min: float) -> Timeline:
    """Return the changes of the state that the highest rank shows at each time; None: no observation."""
    edges = sorted((at, rank, is_up, step) for begin, end, rank, is_up in spans for at, step in ((begin, 1), (end, -1)))
    active, changes = defaultdict[tuple[int, bool], int](int), list[tuple[float, bool | None]]()
    for at, rank, is_up, step in edges:
        active[rank, is_up] += step
        if changes and changes[-1][0] == at:
            changes.pop()
        state = max((key for key, count in active.items() if count > 0), default=(0, None))[1]
        if not changes or changes[-1][1] is not state:
            changes.append((at, state))
    if len(changes) > 1 and now_min - changes[-1][0] <= CURRENT_MIN and changes[-1][1] is None:
        changes.pop()
    return tuple(changes[-MAX_CHANGES:])

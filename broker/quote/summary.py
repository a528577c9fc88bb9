"""A quote in words."""

from broker.domain.offer import Drop, Quote

LABELS = {
    Drop.PROVIDER: "of other providers",
    Drop.ACCELERATOR: "have another accelerator",
    Drop.REGION: "are in other regions",
    Drop.GPUS: "have another number of GPUs",
    Drop.NODES: "join no machines",
    Drop.SPOT: "excluded by the spot policy",
    Drop.UNREACHABLE: "cannot reach a blob store or model in a folder of this machine (use a bucket)",
    Drop.UNSCOPED: "on community hosts, which this blob store has no credentials for",
    Drop.NO_TRAINER: "lack the trainer",
    Drop.UNKNOWN_HARDWARE: "of unknown hardware",
    Drop.MEMORY: "need more memory",
    Drop.HOST: "have too few cores, RAM or disk",
    Drop.TRUST: "on hosts of less trust than asked for",
    Drop.NO_CHECKPOINTS: "spot, for a script without checkpoints",
    Drop.PRICE: "with an impossible price",
    Drop.HOURLY_LIMIT: "above the hourly limit",
    Drop.PREEMPTED_TOO_OFTEN: "preempted too often to finish",
    Drop.DEADLINE: "too slow for the deadline or max_duration",
    Drop.CAP: "above the cap",
    Drop.UNAVAILABLE: "unavailable",
    Drop.EXCLUDED: "sold out, refused or failed lately",
}
"""After a number of offers: why they were dropped."""


def summary(quote: Quote) -> str:
    """One line: `3 of 17 offers kept; dropped: 12 need more memory, 2 above the cap`."""
    text = f"{quote.kept} of {len(quote.lines)} offers kept"
    if quote.drops:
        counted = sorted(quote.drops.items(), key=lambda item: (-item[1], item[0]))
        text += "; dropped: " + ", ".join(f"{n} {LABELS[drop]}" for drop, n in counted)
    if quote.unsold_regions:
        text += f"; no offer is in {', '.join(quote.unsold_regions)}"
    return text

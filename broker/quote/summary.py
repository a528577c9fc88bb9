"""Summarises a quote in one line."""

from broker.domain.offer import DropReason, Quote

LABELS = {
    DropReason.PROVIDER: "of other providers",
    DropReason.ACCELERATOR: "have another accelerator",
    DropReason.REGION: "are in other regions",
    DropReason.GPUS: "have another number of GPUs",
    DropReason.NODES: "don't support multi-node",
    DropReason.SPOT: "excluded by the spot policy",
    DropReason.UNREACHABLE: "cannot reach a blob store or model in a folder of this machine (use a bucket)",
    DropReason.UNSCOPED: "on community hosts, for which this blob store cannot scope credentials",
    DropReason.NO_TRAINER: "without the trainer installed",
    DropReason.NO_IMAGES: "that cannot run the job's image",
    DropReason.UNKNOWN_HARDWARE: "of unknown hardware",
    DropReason.MEMORY: "need more memory",
    DropReason.HOST: "have too few cores, RAM or disk",
    DropReason.TRUST: "on hosts of less trust than asked for",
    DropReason.NO_CHECKPOINTS: "spot, for a script without checkpoints",
    DropReason.PRICE: "with an impossible price",
    DropReason.HOURLY_LIMIT: "above the hourly limit",
    DropReason.PREEMPTED_TOO_OFTEN: "preempted too often to finish",
    DropReason.CONTRACT: "on hosts with a contract that ends before the job",
    DropReason.DEADLINE: "too slow for the deadline or max_duration",
    DropReason.CAP: "above the cap",
    DropReason.UNAVAILABLE: "unavailable",
    DropReason.EXCLUDED: "sold out, refused or failed lately",
}
"""Reason after a number of dropped offers."""


def summary(quote: Quote) -> str:
    """Return one line: `3 of 17 offers kept; dropped: 12 need more memory, 2 above the cap`."""
    text = f"{quote.kept_count} of {len(quote.lines)} offers kept"
    if quote.drops:
        counted = sorted(quote.drops.items(), key=lambda item: (-item[1], item[0]))
        text += "; dropped: " + ", ".join(f"{n} {LABELS[drop]}" for drop, n in counted)
    if quote.deadline_at_risk:
        text += "; the deadline may be missed: no P90 meets it, so the fastest offer whose P50 meets it comes first"
    if quote.unsold_regions:
        text += f"; no offer is in {', '.join(quote.unsold_regions)}"
    return text

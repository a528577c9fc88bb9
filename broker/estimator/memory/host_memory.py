"""What a machine's own memory must hold while its GPUs train: processes, weights as they are read, copies of the state.

Weights in the type that they were published in are mapped, so only those that are cast take memory: measured with
transformers 5 (docs/design/estimator.md). A checkpoint is written from its copy in place, without another one.
"""

from broker.domain.offer import GIB
from broker.domain.workload import DIVIDED, Plan, Workload

PROCESS = 3 * GIB
"""Of each GPU: Python with torch, CUDA's and NCCL's libraries [assumed]."""
AGENT = GIB // 2
MASTER_BYTES, PUBLISHED_BYTES = 4, 2
"""Of a weight: trained in full, and as a base is published."""
CAST = {"fp32": 4, "fp16": 2}
"""Of a weight of a base that is kept in another type than it is published in, by the precision; else it is mapped."""


def host_bytes(work: Workload, plan: Plan, *, states: int, nodes: int = 1) -> int:
    """Bytes of the machine that needs most; `states`: of a checkpoint.

    At first every process reads all weights, of a divided model the first one alone. Then a copy of what is saved
    lies there, of a divided model shared by all machines that hold it, and the best weights if they are kept, which are
    copied as well. At the end the first process has a divided model whole, and adapters are merged into another copy of
    the base.
    """
    assert work.shape is not None
    each, divided = -(-plan.devices // nodes), plan.parallelism in DIVIDED
    parameters = work.shape.parameters
    whole = MASTER_BYTES * parameters if work.method == "full" else 0
    cast = whole or CAST.get(work.precision, 0) * parameters
    read = cast if divided else cast * each
    shared = nodes if plan.parallelism == "fsdp" else 1
    saved = states // shared
    best = 2 * (whole // shared or saved // 3) if work.keeps_best else 0
    result = (whole if divided else 0) + (PUBLISHED_BYTES * parameters if work.merges else 0)
    return each * PROCESS + AGENT + max(read, saved + best, result + best)

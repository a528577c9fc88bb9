"""Host memory that a machine needs during training: processes, weights while loading, copies of the state.

Weights in their published type are memory-mapped, so only weights that are cast take memory, as measured with
transformers 5 (docs/design/estimator.md). A checkpoint is written directly from the copy of the state in host memory.
"""

from broker.domain.offer import GIB
from broker.domain.workload import DIVIDED, Plan, Workload

PROCESS = 3 * GIB
"""Bytes of one GPU's process: Python with torch and the libraries of CUDA and NCCL [assumed]."""
AGENT = GIB // 2
MASTER_BYTES, PUBLISHED_BYTES = 4, 2
"""Bytes of a weight in full training, and of a base weight in its published type."""
CAST = {"fp32": 4, "fp16": 2}
"""Bytes of a base weight that is cast from its published type, by precision. Other weights are memory-mapped."""


def host_bytes(work: Workload, plan: Plan, *, states: int, nodes: int = 1) -> int:
    """Return the host memory, in bytes, of the machine that needs the most; `states`: bytes of a checkpoint.

    At start every process reads all weights; for a sharded model only the first process does. Then each machine holds a
    copy of the state to save; with `fsdp`, each machine holds its part of this copy. With `keeps_best`, the machine
    also holds the best weights and a copy of them. At the end, the first process holds the whole of a sharded model,
    and merging needs another copy of the base.
    """
    assert work.shape is not None
    gpus_per_node, divided = -(-plan.devices // nodes), plan.parallelism in DIVIDED
    parameters = work.shape.parameters
    master_bytes = MASTER_BYTES * parameters if work.method == "full" else 0
    cast = master_bytes or CAST.get(work.precision, 0) * parameters
    read = cast if divided else cast * gpus_per_node
    shared = nodes if plan.parallelism == "fsdp" else 1
    saved = states // shared
    best = 2 * (master_bytes // shared or saved // 3) if work.keeps_best else 0
    result = (master_bytes if divided else 0) + (PUBLISHED_BYTES * parameters if work.merges else 0)
    return gpus_per_node * PROCESS + AGENT + max(read, saved + best, result + best)

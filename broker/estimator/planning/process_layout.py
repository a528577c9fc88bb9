"""Distribution of a model over the processes of an attempt, in the trainer's terms."""

from broker.domain.workload import Plan
from trainer.contract.documents import Parallelism, World


def world(plan: Plan | None, *, nodes: int, gpus: int) -> World:
    """Return the process layout.

    Without a plan, as for a script, each process holds the whole model.

    `gpus`: of each node, 0 for a process on its CPU. GPUs that the plan leaves idle get no process, because it would
    take unplanned memory on the GPU and on the host.
    """
    if plan is not None:
        gpus = min(gpus, -(-plan.devices // nodes))
    ways = {"fsdp": 0, "hybrid": max(1, gpus)}
    if plan is None or plan.parallelism not in ways:
        return World(nodes=nodes, gpus_per_node=gpus)
    shared = Parallelism(kind="fsdp", shard=ways[plan.parallelism])
    return World(nodes=nodes, gpus_per_node=gpus, parallelism=shared)

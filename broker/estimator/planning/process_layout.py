"""How the processes of an attempt share the model: the plan, as the trainer is told it."""

from broker.domain.workload import Plan
from trainer.contract.documents import Parallelism, World


def world(plan: Plan | None, *, nodes: int, gpus: int) -> World:
    """`gpus`: of each node, 0 for a process on its CPU. Without a plan, as for a script, each would hold all of it.

    GPUs that the plan leaves idle have no process: it would take memory that nobody planned, there and on the host.
    """
    if plan is not None:
        gpus = min(gpus, -(-plan.devices // nodes))
    ways = {"fsdp": 0, "hybrid": max(1, gpus)}
    if plan is None or plan.parallelism not in ways:
        return World(nodes=nodes, gpus_per_node=gpus)
    shared = Parallelism(kind="fsdp", shard=ways[plan.parallelism])
    return World(nodes=nodes, gpus_per_node=gpus, parallelism=shared)

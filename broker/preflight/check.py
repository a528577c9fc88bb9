"""Everything that can be checked for nothing, in one call."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from broker.domain.errors import InvalidInput, Problem
from broker.domain.spec import JobSpec
from broker.domain.workload import ModelShape, Workload
from broker.estimator.architecture.families import family_spec
from broker.estimator.architecture.lora_targets import EMBEDDINGS, choose, nearest
from broker.estimator.memory.evidence import TRACED
from broker.estimator.workload import workload
from broker.preflight.dataset import DataReport, DataSummary, check, rows_of
from broker.preflight.model_lookup import Unshaped
from trainer.contract.train import LowRank, TrainConfig

HEADS = ("lm_head", "embed_out")
"""Of the model, beside the modules of its layers."""


@dataclass(frozen=True, kw_only=True)
class PreflightCheck:
    """The job as the estimators see it, and what people are shown of their data; `report` is None for a script."""

    workload: Workload
    report: DataReport | None


async def preflight(
    spec: JobSpec, *, summary: DataSummary | None, resolve: Callable[[TrainConfig], Awaitable[ModelShape | Unshaped]]
) -> PreflightCheck:
    """`summary`: of the data set that `train.data.path` names; None when it was not uploaded. `resolve`: the model.

    Raises InvalidInput. The data set is looked at first, since the model may need the network.
    """
    train = spec.train
    if train is None:
        return PreflightCheck(workload=workload(spec, None, None), report=None)
    if summary is None:
        raise InvalidInput(Problem(field="train.data.path", message="no such data set here; upload it, then name it"))
    _check_samples(train)
    _check_steps(train, spec.resources.nodes)
    report = check(train, summary)
    model = await resolve(train)
    shape, positions = (None, model.positions) if isinstance(model, Unshaped) else (model, model.max_positions)
    if shape is not None and train.adapters is not None:
        _check_targets(train.adapters, shape)
    if shape is not None and shape.experts and train.quantised is not None:
        message = f"qlora quantises linear modules, and the experts of {shape.name} are none; use lora"
        raise InvalidInput(Problem(field="train.method.kind", message=message))
    work = workload(spec, shape, rows_of(train, summary))
    if positions is not None and work.sequence > positions:
        message = f"rows reach {work.sequence} tokens, {model.name} has {positions} positions; lower it"
        raise InvalidInput(Problem(field="train.max_length", message=message))
    return PreflightCheck(workload=work, report=report)


def _check_samples(train: TrainConfig) -> None:
    if train.task != "text_to_image" and not all(prompt.strip() for prompt in train.samples.prompts):
        message = "one of them is blank, so nothing can follow it; give it a word, or remove it"
        raise InvalidInput(Problem(field="train.samples.prompts", message=message))


def _check_steps(train: TrainConfig, nodes: int) -> None:
    """No rule of the spec itself: how a step is divided may change, and what was submitted stays readable."""
    unit = nodes * (1 if train.micro_batch == "auto" else train.micro_batch)
    if train.global_batch != "auto" and train.global_batch % unit:
        message = f"{nodes} nodes cannot take equal parts of {train.global_batch} rows; give a multiple of {unit}"
        raise InvalidInput(Problem(field="train.global_batch", message=message))


def _check_targets(lora: LowRank, shape: ModelShape) -> None:
    """Names that match no module, of an architecture whose modules are known. Raises InvalidInput."""
    if isinstance(lora.targets, str) or shape.family not in TRACED:
        return
    names = family_spec(shape).names
    for target in lora.targets:
        if target.rsplit(".", 1)[-1] not in HEADS and not _adapted(target, shape):
            known = tuple(dict.fromkeys(names.values()))
            near = nearest(target, known)
            message = f"{target!r} matches no linear module of {shape.name}{near}; it has {', '.join(known)}"
            raise InvalidInput(Problem(field="train.method.targets", message=message))


def _adapted(target: str, shape: ModelShape) -> bool:
    """Whether the trainer finds a module of that name to adapt; embeddings are none."""
    try:
        return bool(choose(shape, (target,), tuple(family_spec(shape).names.items())).roles - {EMBEDDINGS})
    except ValueError:
        return False

"""All free checks of a job in one call."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from broker.domain.errors import InvalidInput, Problem
from broker.domain.spec import JobSpec
from broker.domain.workload import ModelShape, Workload
from broker.estimator.architecture.families import family_spec
from broker.estimator.architecture.lora_targets import EMBEDDINGS, choose, nearest
from broker.estimator.memory.evidence import TRACED
from broker.estimator.workload import workload
from broker.preflight.dataset import DataReport, DataSummary, check, rows_of
from broker.preflight.model_lookup import Unshaped
from broker.runtime.cpu_threads import RunCpu, run_inline
from trainer.contract.architectures import QUANTISED_EXPERTS
from trainer.contract.train import LowRank, TrainConfig

HEADS = ("lm_head", "embed_out")
"""Linear modules outside the model's layers."""


@dataclass(frozen=True, kw_only=True)
class PreflightCheck:
    """Result of the checks."""

    workload: Workload
    """The job in the form that the estimators take."""
    report: DataReport | None
    """Report about the data set for the user; None for a script."""


async def preflight(
    spec: JobSpec,
    *,
    summary: DataSummary | None,
    resolve: Callable[[TrainConfig], Awaitable[ModelShape | Unshaped]],
    run: RunCpu = run_inline,
) -> PreflightCheck:
    """Check a spec against its data set and its model. Raises InvalidInput, Busy.

    `summary`: summary of the data set at `train.data.path`; None if it was not uploaded. `resolve`: looks up the
    model. `run`: runs the computations. The data set is checked first, because the model may need the network.
    """
    train = spec.train
    if train is None:
        return PreflightCheck(workload=workload(spec, None, None), report=None)
    if summary is None:
        raise InvalidInput(Problem(field="train.data.path", message="no such data set; upload it, then name it"))
    report = await run(partial(_check_data, train, summary, spec.resources.nodes))
    model = await resolve(train)
    return await run(partial(_check_model, spec, train, summary, report, model))


def _check_data(train: TrainConfig, summary: DataSummary, nodes: int) -> DataReport:
    _check_samples(train)
    _check_steps(train, nodes)
    return check(train, summary)


def _check_model(
    spec: JobSpec, train: TrainConfig, summary: DataSummary, report: DataReport, model: ModelShape | Unshaped
) -> PreflightCheck:
    shape, positions = (None, model.positions) if isinstance(model, Unshaped) else (model, model.max_positions)
    if shape is not None and train.adapters is not None:
        _check_targets(train.adapters, shape)
    if model.experts and train.quantised is not None:
        raise InvalidInput(Problem(field="train.method.kind", message=QUANTISED_EXPERTS))
    work = workload(spec, shape, rows_of(train, summary))
    if positions is not None and work.sequence > positions:
        message = f"rows reach {work.sequence} tokens, {model.name} has {positions} positions; lower it"
        raise InvalidInput(Problem(field="train.max_length", message=message))
    return PreflightCheck(workload=work, report=report)


def _check_samples(train: TrainConfig) -> None:
    if train.task != "text_to_image" and not all(prompt.strip() for prompt in train.samples.prompts):
        message = "a prompt is blank; add text to it, or remove it"
        raise InvalidInput(Problem(field="train.samples.prompts", message=message))


def _check_steps(train: TrainConfig, nodes: int) -> None:
    """Raise InvalidInput if the global batch cannot be divided among the nodes.

    The spec's own model does not check it, so that stored specs stay valid if the division changes.
    """
    unit = nodes * (1 if train.micro_batch == "auto" else train.micro_batch)
    if train.global_batch != "auto" and train.global_batch % unit:
        message = f"{nodes} nodes cannot share {train.global_batch} rows equally; give a multiple of {unit}"
        raise InvalidInput(Problem(field="train.global_batch", message=message))


def _check_targets(lora: LowRank, shape: ModelShape) -> None:
    """Raise InvalidInput for a target that matches no module, if the architecture's modules are known."""
    if isinstance(lora.targets, str) or shape.family not in TRACED:
        return
    names = family_spec(shape).names
    for target in lora.targets:
        if target.rsplit(".", 1)[-1] not in HEADS and not _is_adaptable(target, shape):
            modules = tuple(dict.fromkeys(names.values()))
            hint = nearest(target, modules)
            message = f"{target!r} matches no linear module of {shape.name}{hint}; it has {', '.join(modules)}"
            raise InvalidInput(Problem(field="train.method.targets", message=message))


def _is_adaptable(target: str, shape: ModelShape) -> bool:
    """Return True if the trainer can adapt a module of this name; embeddings cannot be adapted."""
    try:
        return bool(choose(shape, (target,), tuple(family_spec(shape).names.items())).roles - {EMBEDDINGS})
    except ValueError:
        return False

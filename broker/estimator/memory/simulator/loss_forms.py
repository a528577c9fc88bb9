"""Forms of the loss, in the trainer and in versions of transformers: the tensors that each makes and holds."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from broker.estimator.memory.simulator.tape import Tape, TensorScope
from broker.estimator.memory.simulator.tensors import Tensor


class LossForm(ABC):
    """A way to compute the cross entropy of logits. Two forms of the same class are equal."""

    in_model: ClassVar[bool] = True
    """The model computes the loss itself, so its variable of the last hidden states exists until the loss does."""

    def loss(self, tape: Tape, logits: Tensor, *, length: int, autocast: bool) -> Tensor:
        """Return the loss of rows of `length` tokens; consumes the logits.

        All tensors in variables of the loss function live until it returns.
        """
        with tape.scope() as variables:
            flat = self.flatten(tape, variables, logits, length=length, autocast=autocast)
            if autocast:  # log-softmax is computed in float32 then
                flat = tape.after(flat, tape.cast(flat, 4))
            variables.hold(flat)
            log_probabilities = variables.hold(tape.elementwise_by_result(flat))
            return tape.resize(log_probabilities, 1, 4)

    @abstractmethod
    def flatten(self, tape: Tape, variables: TensorScope, logits: Tensor, *, length: int, autocast: bool) -> Tensor:
        """Return the logits as the log-softmax takes them; consumes `logits`.

        The caller holds the result. `variables` holds all that the loss function keeps until it returns.
        """


@dataclass(frozen=True)
class TrainerLoss(LossForm):
    """Loss outside the model: logits are cast under autocast, and the positions that have a loss are selected."""

    in_model: ClassVar[bool] = False

    def flatten(self, tape: Tape, variables: TensorScope, logits: Tensor, *, length: int, autocast: bool) -> Tensor:
        if autocast:
            logits = tape.after(logits, tape.resize(logits, logits.count, 4))
        variables.hold(logits)
        predicted = logits.count // length * (length - 1)  # a row's first token is not predicted
        selected = tape.resize(logits, predicted)
        return tape.after(selected, tape.cast(selected, 4))


TRAINER_LOSS = TrainerLoss()


@dataclass(frozen=True)
class PaddedLoss(LossForm):
    """Loss of logits in float32 and padded labels; no logits are copied to be shifted."""

    def flatten(self, tape: Tape, variables: TensorScope, logits: Tensor, *, length: int, autocast: bool) -> Tensor:
        variables.hold(logits)
        return tape.hold(variables.hold(tape.cast(logits, 4)))


@dataclass(frozen=True)
class ShiftedLoss(LossForm):
    """Loss of logits that are cast to float32 and then shifted; the unshifted copy lives as long."""

    def flatten(self, tape: Tape, variables: TensorScope, logits: Tensor, *, length: int, autocast: bool) -> Tensor:
        variables.hold(logits)
        return tape.scale(variables.hold(tape.cast(logits, 4)))


@dataclass(frozen=True)
class FloatLoss(LossForm):
    """Loss of shifted float32 logits, which replace the unshifted ones in the model's variable."""

    def flatten(self, tape: Tape, variables: TensorScope, logits: Tensor, *, length: int, autocast: bool) -> Tensor:
        return tape.scale(variables.hold(tape.after(logits, tape.cast(logits, 4))))


@dataclass(frozen=True)
class OwnTypeLoss(LossForm):
    """Loss of logits that are shifted in their own type; a variable of the model holds the shifted ones too."""

    def flatten(self, tape: Tape, variables: TensorScope, logits: Tensor, *, length: int, autocast: bool) -> Tensor:
        shifted = tape.scale(variables.hold(logits))
        return tape.hold(variables.hold(shifted))


@dataclass(frozen=True, kw_only=True)
class ChunkedLoss(LossForm):
    """Loss of one part of the tokens after another, each in float32; the head is computed in the same parts."""

    in_model: ClassVar[bool] = False
    chunks: int
    kept: int
    """Bytes that remain of each logit until its backward pass."""

    def flatten(self, tape: Tape, variables: TensorScope, logits: Tensor, *, length: int, autocast: bool) -> Tensor:
        variables.hold(logits)
        return tape.cast(logits, 4)

    def others(self, count: int) -> int:
        """Return the bytes that all parts but one keep of `count` logits."""
        return count * self.kept * (self.chunks - 1) // self.chunks


@dataclass(frozen=True, kw_only=True)
class InPlaceLoss(LossForm):
    """Loss of one kernel that keeps no log-probabilities and writes the gradient into the logits it was given."""

    inner: LossForm

    def loss(self, tape: Tape, logits: Tensor, *, length: int, autocast: bool) -> Tensor:
        with tape.scope() as variables:
            flat = self.flatten(tape, variables, logits, length=length, autocast=autocast)
            return tape.after(flat, tape.resize(flat, 1, 4))

    def flatten(self, tape: Tape, variables: TensorScope, logits: Tensor, *, length: int, autocast: bool) -> Tensor:
        return self.inner.flatten(tape, variables, logits, length=length, autocast=autocast)


@dataclass(frozen=True, kw_only=True)
class HeldLoss(LossForm):
    """Loss of a plain loop, whose variable of the model's output holds the logits until the next step's exist."""

    inner: LossForm

    def loss(self, tape: Tape, logits: Tensor, *, length: int, autocast: bool) -> Tensor:
        logits.retain()
        return super().loss(tape, logits, length=length, autocast=autocast)

    def flatten(self, tape: Tape, variables: TensorScope, logits: Tensor, *, length: int, autocast: bool) -> Tensor:
        return self.inner.flatten(tape, variables, logits, length=length, autocast=autocast)


@dataclass(frozen=True)
class ClassLoss(LossForm):
    """Loss of a few classes, in float32."""

    in_model: ClassVar[bool] = False

    def flatten(self, tape: Tape, variables: TensorScope, logits: Tensor, *, length: int, autocast: bool) -> Tensor:
        return tape.cast(variables.hold(logits), 4)

"""Simulator of the allocations of one training step: `simulate` returns the peak of every segment. Pure."""

from functools import lru_cache

from broker.domain.workload import ModelShape
from broker.estimator.architecture.families import family_spec
from broker.estimator.memory.simulator.classifier import ClassifierSimulator
from broker.estimator.memory.simulator.decoder import DecoderSimulator
from broker.estimator.memory.simulator.encoder import EncoderSimulator
from broker.estimator.memory.simulator.seq2seq import Seq2SeqSimulator
from broker.estimator.memory.simulator.types import Step, StepPeak


@lru_cache(maxsize=256)
def simulate(shape: ModelShape, step: Step) -> StepPeak:
    """Return the peak of every segment on one device.

    Takes about 2 ms. The result is cached, because thousands of offers share it.
    """
    headed = EncoderSimulator if family_spec(shape).encoder else ClassifierSimulator
    kind = Seq2SeqSimulator if shape.decoder_layers else headed if shape.labels else DecoderSimulator
    return kind(shape, step).run()

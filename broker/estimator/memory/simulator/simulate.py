"""Which player a model's step is played by."""

from functools import lru_cache

from broker.domain.workload import ModelShape
from broker.estimator.architecture.families import build_of
from broker.estimator.memory.simulator.classifier import HeadedPlayer
from broker.estimator.memory.simulator.decoder import Player
from broker.estimator.memory.simulator.encoder import EncoderPlayer
from broker.estimator.memory.simulator.seq2seq import PairPlayer
from broker.estimator.memory.simulator.types import Played, Step


@lru_cache(maxsize=256)
def play(shape: ModelShape, step: Step) -> Played:
    """Every segment's worst moment on one device. About 2 ms; a market asks the same for thousands of offers."""
    headed = EncoderPlayer if build_of(shape).encoder else HeadedPlayer
    kind = PairPlayer if shape.decoder_layers else headed if shape.labels else Player
    return kind(shape, step).play()

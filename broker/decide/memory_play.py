"""Which player a model's step is played by."""

from functools import lru_cache

from broker.decide.memory_builds import build_of
from broker.decide.memory_encoder import EncoderPlayer
from broker.decide.memory_headed import HeadedPlayer
from broker.decide.memory_seq2seq import PairPlayer
from broker.decide.memory_step import Player
from broker.decide.memory_terms import Played, Step
from broker.domain.workload import ModelShape


@lru_cache(maxsize=256)
def play(shape: ModelShape, step: Step) -> Played:
    """Every segment's worst moment on one device. About 2 ms; a market asks the same for thousands of offers."""
    headed = EncoderPlayer if build_of(shape).encoder else HeadedPlayer
    kind = PairPlayer if shape.decoder_layers else headed if shape.labels else Player
    return kind(shape, step).play()

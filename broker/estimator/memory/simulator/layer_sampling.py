"""Choice of the layers that are simulated, and how many other layers each of them represents."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from broker.domain.workload import ModelShape
from broker.estimator.architecture.families import family_spec


@dataclass(frozen=True, kw_only=True)
class Depth:
    """Layers to simulate: the first, one of every kind in between, and the last. Two kinds: with and without a mask."""

    kinds: tuple[bool, ...]
    """Kinds of all layers of the model."""
    simulated: tuple[bool, ...]
    """Kinds of the layers on the tape."""

    @staticmethod
    @lru_cache(maxsize=256)
    def of(shape: ModelShape, length: int, *, sdpa: bool) -> "Depth":
        """Choose the layers.

        `sdpa`: torch's attention, which needs a mask; other kernels support windows themselves.
        """
        masked = sdpa and (family_spec(shape).masked or bool(shape.window and length >= shape.window))
        kinds = tuple(masked and is_windowed for is_windowed in shape.windowed or (True,) * shape.layers)
        between = tuple(dict.fromkeys(kinds[1:-1]))
        return Depth(kinds=kinds, simulated=(*kinds[:1], *between, *kinds[1:][-1:]))

    def _between(self) -> Sequence[bool]:
        return self.kinds[1:-1]

    def others(self, number: int) -> int:
        """Return the number of middle layers that the simulated layer represents, without itself."""
        return self._between().count(self.simulated[number]) - 1

    def extremes(self, number: int, *, forward: bool) -> Iterator[tuple[str, Mapping[int, int]]]:
        """Yield (place, offsets) of the first and the last represented layer of the simulated layer, in running order.

        `offsets` maps each simulated middle layer to a count of its kind: layers run so far in the model, less those on
        the tape.
        """
        between, kind = self._between(), self.simulated[number]
        positions = [i for i, other in enumerate(between) if other == kind]
        numbers = range(1, len(self.simulated) - 1)
        on_tape = Counter(
            {self.simulated[n]: between.count(self.simulated[n]) for n in numbers if (n < number) == forward}
        )
        on_tape[kind] = 0
        for i in dict.fromkeys((positions[0], positions[-1])):
            run = Counter(between[:i] if forward else between[i + 1 :])
            place = {0: "second", len(between) - 1: "last but one"}.get(i, "middle")
            yield place, {n: run[self.simulated[n]] - on_tape[self.simulated[n]] for n in numbers}

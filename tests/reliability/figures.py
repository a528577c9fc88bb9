"""Figures that a scenario measured."""

from dataclasses import dataclass, field


@dataclass
class Figures:
    """Figures of one scenario, in the order in which they were measured."""

    values: dict[str, float] = field(default_factory=dict)

    def note(self, name: str, value: float) -> None:
        self.values[name] = value

    def text(self) -> str:
        return ", ".join(f"{name} {value:.1f}" for name, value in self.values.items())

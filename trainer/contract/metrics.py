"""Where the figures of a training go beside the journal and TensorBoard's files, which are always there."""

from typing import Annotated, Literal

from pydantic import Field

from trainer.contract.base import Config, Text, shaped
from trainer.contract.output import Secret


class WandbConfig(Config):
    """Weights & Biases; one run for the whole job, however often it is resumed."""

    project: Annotated[Text, Field(min_length=1, max_length=128, examples=["my-project"])]
    entity: Annotated[Text, Field(max_length=128)] | None = None
    """Absent: the key's own."""
    mode: Literal["online", "offline"] = "online"
    """`offline`: for `wandb sync`, below `wandb/` of the output folder; of `python -m trainer --config` only."""
    secret: Secret = "WANDB_API_KEY"
    """Name of the secret that holds the key; none is needed offline."""


class MlflowConfig(Config):
    """MLflow; one run for the whole job, found by its tag `gpubroker.run`."""

    uri: Annotated[
        Text,
        shaped(
            r"^(https?|file)://",
            "must begin with https://, http:// or file://",
            max_length=1024,
            examples=["https://mlflow.example.org"],
        ),
    ]
    """The tracking server, or a folder for `python -m trainer --config`."""
    experiment: Annotated[Text, Field(min_length=1, max_length=256)] = "gpubroker"
    """Made if it is absent."""
    secret: Secret | None = None
    """Name of the secret that holds a bearer token."""


class MetricsConfig(Config):
    """A tracker that fails is told as an event, and costs the training nothing."""

    wandb: WandbConfig | None = None
    mlflow: MlflowConfig | None = None

    @property
    def trackers(self) -> bool:
        """Whether packages of the extra `trackers` are needed."""
        return self.wandb is not None or self.mlflow is not None

    @property
    def secrets(self) -> tuple[str, ...]:
        """Names that the job must list."""
        online = self.wandb is not None and self.wandb.mode == "online"
        named = (self.wandb.secret if self.wandb and online else None, self.mlflow.secret if self.mlflow else None)
        return tuple(name for name in named if name)

    @property
    def local(self) -> str | None:
        """The setting that keeps figures on the machine alone, where they would be lost with it."""
        if self.wandb is not None and self.wandb.mode == "offline":
            return "wandb.mode: offline"
        return "mlflow.uri: file://" if self.mlflow is not None and self.mlflow.uri.startswith("file:") else None

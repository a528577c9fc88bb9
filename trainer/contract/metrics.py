"""Trackers that receive the figures of a training, in addition to the journal and TensorBoard's files."""

from typing import Annotated, Literal

from pydantic import Field

from trainer.contract.base import Config, Text, matching
from trainer.contract.output import Secret


class WandbConfig(Config):
    """Weights & Biases: one run for the whole job, over all resumes."""

    project: Annotated[Text, Field(min_length=1, max_length=128, examples=["my-project"])]
    entity: Annotated[Text, Field(max_length=128)] | None = None
    """Absent: the default entity of the key."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes files for `wandb sync` to `wandb/` in the output folder; only for `python -m trainer
    --config`.
    """
    secret: Secret = "WANDB_API_KEY"
    """Name of the secret that holds the key; not needed offline."""


class MlflowConfig(Config):
    """MLflow: one run for the whole job, identified by its tag `gpubroker.run`."""

    uri: Annotated[
        Text,
        matching(
            r"^(https?|file)://",
            "must begin with https://, http:// or file://",
            max_length=1024,
            examples=["https://mlflow.example.org"],
        ),
    ]
    """URL of the tracking server, or a folder for `python -m trainer --config`."""
    experiment: Annotated[Text, Field(min_length=1, max_length=256)] = "gpubroker"
    """Name of the experiment; created if it does not exist."""
    secret: Secret | None = None
    """Name of the secret that holds a bearer token."""


class MetricsConfig(Config):
    """Trackers. A failing tracker is reported as an event and does not affect the training."""

    wandb: WandbConfig | None = None
    mlflow: MlflowConfig | None = None

    @property
    def trackers(self) -> bool:
        """Return True if packages of the extra `trackers` are needed."""
        return self.wandb is not None or self.mlflow is not None

    @property
    def secrets(self) -> tuple[str, ...]:
        """Names of secrets that the job must list."""
        online = self.wandb is not None and self.wandb.mode == "online"
        named = (self.wandb.secret if self.wandb and online else None, self.mlflow.secret if self.mlflow else None)
        return tuple(name for name in named if name)

    @property
    def local(self) -> str | None:
        """Return the setting that stores figures only on the machine, where they would be lost, or None."""
        if self.wandb is not None and self.wandb.mode == "offline":
            return "wandb.mode: offline"
        return "mlflow.uri: file://" if self.mlflow is not None and self.mlflow.uri.startswith("file:") else None

"""Destinations of results in addition to the blob store."""

from typing import Annotated

from trainer.contract.base import Config, Text, matching

Secret = Annotated[
    str,
    matching(
        r"^[A-Za-z_][A-Za-z0-9_]*$",
        "must be letters, digits and _, with no digit at the beginning",
        max_length=128,
    ),
]


class PushConfig(Config):
    """Repository on the Hugging Face Hub, or on another hub that `HF_ENDPOINT` in `env` names."""

    repo: Annotated[
        str,
        matching(
            r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$",
            "must be a repository, as owner/name",
            max_length=192,
            examples=["owner/name"],
        ),
    ]
    """`owner/name`; created if it does not exist."""
    private: bool = True
    """Visibility of a repository that is created."""
    secret: Secret = "HF_TOKEN"
    """Name of the secret that holds a token with write permission."""


class CopyConfig(Config):
    """Folder in another blob store."""

    url: Annotated[
        Text,
        matching(
            r"^(s3|gs|az|abfss?|file)://",
            "must begin with s3://, gs://, az://, abfs://, abfss:// or file://",
            max_length=1024,
            examples=["s3://bucket/prefix"],
        ),
    ]
    """Target folder, such as `s3://bucket/prefix`. The results of a job go below `<job>/`."""
    secret: Secret | None = None
    """Name of the secret with the store's credentials: a JSON object of options, such as `aws_access_key_id`."""


class OutputConfig(Config):
    """Copies of the results; the job's artifacts hold them in any case."""

    merge: bool = False
    """Save the merged full model too: adapters added to the published weights."""
    push: PushConfig | None = None
    copy_to: CopyConfig | None = None

    @property
    def secrets(self) -> tuple[str, ...]:
        """Names of secrets that the job must list."""
        named = (self.push.secret if self.push else None, self.copy_to.secret if self.copy_to else None)
        return tuple(name for name in named if name)

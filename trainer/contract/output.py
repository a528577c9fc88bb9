"""What becomes of the results beside the blob store."""

from typing import Annotated

from trainer.contract.base import Config, Text, shaped

Secret = Annotated[
    str,
    shaped(
        r"^[A-Za-z_][A-Za-z0-9_]*$",
        "must be letters, digits and _, with no digit at the beginning",
        max_length=128,
    ),
]


class PushConfig(Config):
    """A repository of the Hugging Face Hub, or of another one that `HF_ENDPOINT` in `env` names."""

    repo: Annotated[
        str,
        shaped(
            r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$",
            "must be a repository, as owner/name",
            max_length=192,
            examples=["owner/name"],
        ),
    ]
    """`owner/name`; made if it is absent."""
    private: bool = True
    """Of a repository that is made."""
    secret: Secret = "HF_TOKEN"
    """Name of the secret that holds a token which may write there."""


class CopyConfig(Config):
    """A place in another blob store."""

    url: Annotated[
        Text,
        shaped(
            r"^(s3|gs|az|abfss?|file)://",
            "must begin with s3://, gs://, az://, abfs://, abfss:// or file://",
            max_length=1024,
            examples=["s3://bucket/prefix"],
        ),
    ]
    """A folder: `s3://bucket/prefix`. The results of a job go below `<job>/`."""
    secret: Secret | None = None
    """Name of the secret with its credentials: a JSON object of the store's options, such as `aws_access_key_id`."""


class OutputConfig(Config):
    """The results lie in the job's artifacts first, and stay there."""

    merge: bool = False
    """Of adapters also the whole model, merged into the weights as they were published."""
    push: PushConfig | None = None
    copy_to: CopyConfig | None = None

    @property
    def secrets(self) -> tuple[str, ...]:
        """Names that the job must list."""
        named = (self.push.secret if self.push else None, self.copy_to.secret if self.copy_to else None)
        return tuple(name for name in named if name)

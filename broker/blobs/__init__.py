"""The meeting place of broker and trainer: folder, memory, S3, GCS or Azure, all through obstore."""

from broker.blobs.grants import GrantSettings
from broker.blobs.store import ObstoreBlobs

__all__ = ["GrantSettings", "ObstoreBlobs"]

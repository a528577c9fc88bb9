"""The meeting place of broker and trainer: folder, memory, S3, GCS or Azure, all through obstore."""

from broker.blobs.credentials.issuers import GrantSettings
from broker.blobs.obstore_blobs import ObstoreBlobs

__all__ = ["GrantSettings", "ObstoreBlobs"]

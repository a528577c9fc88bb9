"""Blob store that broker and trainer share: folder, memory, S3, GCS or Azure, all through obstore."""

from broker.blobs.credentials.issuers import GrantSettings
from broker.blobs.obstore_blobs import ObstoreBlobs

__all__ = ["GrantSettings", "ObstoreBlobs"]

"""Protocols through which the controllers reach databases, clouds, blob stores and users.

Store, Provider, Blobs and Notifier each have a conformance suite in tests/conformance that every implementation passes.
"""

from broker.ports.blobs import BlobInfo, Blobs, StoreAccess
from broker.ports.changes import AuditFilter, Change, Charge, JobFilter, Lane, Leased, Token, Upload
from broker.ports.channels import ChannelStatus, DeliveryResult, Pending, Settlement, Stream
from broker.ports.job_data import Note, StorageCharge
from broker.ports.notifier import Notifier, Settings, State
from broker.ports.provider import Clock, Provider
from broker.ports.store import Store
from broker.ports.tenant_store import TenantStore

__all__ = [
    "AuditFilter",
    "BlobInfo",
    "Blobs",
    "Change",
    "ChannelStatus",
    "Charge",
    "Clock",
    "DeliveryResult",
    "JobFilter",
    "Lane",
    "Leased",
    "Note",
    "Notifier",
    "Pending",
    "Provider",
    "Settings",
    "Settlement",
    "State",
    "StorageCharge",
    "Store",
    "StoreAccess",
    "Stream",
    "TenantStore",
    "Token",
    "Upload",
]

from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class UploadFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UPLOAD_FORMAT_UNSPECIFIED: _ClassVar[UploadFormat]
    UPLOAD_FORMAT_CSV: _ClassVar[UploadFormat]
    UPLOAD_FORMAT_JSON: _ClassVar[UploadFormat]
    UPLOAD_FORMAT_JSONL: _ClassVar[UploadFormat]
    UPLOAD_FORMAT_TAR: _ClassVar[UploadFormat]
    UPLOAD_FORMAT_ZIP: _ClassVar[UploadFormat]
    UPLOAD_FORMAT_PARQUET: _ClassVar[UploadFormat]
UPLOAD_FORMAT_UNSPECIFIED: UploadFormat
UPLOAD_FORMAT_CSV: UploadFormat
UPLOAD_FORMAT_JSON: UploadFormat
UPLOAD_FORMAT_JSONL: UploadFormat
UPLOAD_FORMAT_TAR: UploadFormat
UPLOAD_FORMAT_ZIP: UploadFormat
UPLOAD_FORMAT_PARQUET: UploadFormat

class UploadRequest(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: UploadHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[UploadHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class UploadHeader(_message.Message):
    __slots__ = ("name", "format", "sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    format: UploadFormat
    sha256: str
    def __init__(self, name: _Optional[str] = ..., format: _Optional[_Union[UploadFormat, str]] = ..., sha256: _Optional[str] = ...) -> None: ...

class UploadResponse(_message.Message):
    __slots__ = ("upload",)
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    upload: Upload
    def __init__(self, upload: _Optional[_Union[Upload, _Mapping]] = ...) -> None: ...

class Upload(_message.Message):
    __slots__ = ("ref", "sha256", "bytes", "name", "summary")
    REF_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    ref: str
    sha256: str
    bytes: int
    name: str
    summary: _struct_pb2.Struct
    def __init__(self, ref: _Optional[str] = ..., sha256: _Optional[str] = ..., bytes: _Optional[int] = ..., name: _Optional[str] = ..., summary: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class ListArtifactsRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class ListArtifactsResponse(_message.Message):
    __slots__ = ("step", "complete", "items")
    STEP_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    step: int
    complete: bool
    items: _containers.RepeatedCompositeFieldContainer[Artifact]
    def __init__(self, step: _Optional[int] = ..., complete: _Optional[bool] = ..., items: _Optional[_Iterable[_Union[Artifact, _Mapping]]] = ...) -> None: ...

class Artifact(_message.Message):
    __slots__ = ("path", "bytes", "sha256")
    PATH_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    path: str
    bytes: int
    sha256: str
    def __init__(self, path: _Optional[str] = ..., bytes: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class DownloadArtifactRequest(_message.Message):
    __slots__ = ("job_id", "path", "offset")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    path: str
    offset: int
    def __init__(self, job_id: _Optional[str] = ..., path: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class DownloadArtifactResponse(_message.Message):
    __slots__ = ("file", "data")
    FILE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    file: Artifact
    data: bytes
    def __init__(self, file: _Optional[_Union[Artifact, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

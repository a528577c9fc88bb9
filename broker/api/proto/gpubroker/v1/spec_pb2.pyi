import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from broker.api.proto.gpubroker.v1 import offer_pb2 as _offer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class IdleAction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    IDLE_ACTION_UNSPECIFIED: _ClassVar[IdleAction]
    IDLE_ACTION_NOTIFY: _ClassVar[IdleAction]
    IDLE_ACTION_DRAIN: _ClassVar[IdleAction]
    IDLE_ACTION_END: _ClassVar[IdleAction]

class WandbMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WANDB_MODE_UNSPECIFIED: _ClassVar[WandbMode]
    WANDB_MODE_ONLINE: _ClassVar[WandbMode]
    WANDB_MODE_OFFLINE: _ClassVar[WandbMode]

class Task(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_UNSPECIFIED: _ClassVar[Task]
    TASK_CAUSAL_LM: _ClassVar[Task]
    TASK_TEXT_CLASSIFICATION: _ClassVar[Task]
    TASK_TEXT_REGRESSION: _ClassVar[Task]
    TASK_TOKEN_CLASSIFICATION: _ClassVar[Task]
    TASK_SEQ2SEQ: _ClassVar[Task]
    TASK_DPO: _ClassVar[Task]
    TASK_REWARD_MODEL: _ClassVar[Task]
    TASK_IMAGE_CLASSIFICATION: _ClassVar[Task]
    TASK_TEXT_TO_IMAGE: _ClassVar[Task]
    TASK_ORPO: _ClassVar[Task]
    TASK_KTO: _ClassVar[Task]

class Precision(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRECISION_UNSPECIFIED: _ClassVar[Precision]
    PRECISION_AUTO: _ClassVar[Precision]
    PRECISION_BF16: _ClassVar[Precision]
    PRECISION_FP16: _ClassVar[Precision]
    PRECISION_FP32: _ClassVar[Precision]

class LearnedAnswers(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEARNED_ANSWERS_UNSPECIFIED: _ClassVar[LearnedAnswers]
    LEARNED_ANSWERS_ALL: _ClassVar[LearnedAnswers]
    LEARNED_ANSWERS_LAST: _ClassVar[LearnedAnswers]
    LEARNED_ANSWERS_SPLIT: _ClassVar[LearnedAnswers]

class DataFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_FORMAT_UNSPECIFIED: _ClassVar[DataFormat]
    DATA_FORMAT_CSV: _ClassVar[DataFormat]
    DATA_FORMAT_JSON: _ClassVar[DataFormat]
    DATA_FORMAT_JSONL: _ClassVar[DataFormat]
    DATA_FORMAT_TAR: _ClassVar[DataFormat]
    DATA_FORMAT_ZIP: _ClassVar[DataFormat]
    DATA_FORMAT_PARQUET: _ClassVar[DataFormat]

class LoraTargets(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LORA_TARGETS_UNSPECIFIED: _ClassVar[LoraTargets]
    LORA_TARGETS_ALL_LINEAR: _ClassVar[LoraTargets]
    LORA_TARGETS_ATTENTION: _ClassVar[LoraTargets]

class Attention(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ATTENTION_UNSPECIFIED: _ClassVar[Attention]
    ATTENTION_AUTO: _ClassVar[Attention]
    ATTENTION_SDPA: _ClassVar[Attention]
    ATTENTION_FLASH: _ClassVar[Attention]
    ATTENTION_EAGER: _ClassVar[Attention]

class OptimizerName(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPTIMIZER_NAME_UNSPECIFIED: _ClassVar[OptimizerName]
    OPTIMIZER_NAME_ADAMW: _ClassVar[OptimizerName]
    OPTIMIZER_NAME_ADAMW_8BIT: _ClassVar[OptimizerName]
    OPTIMIZER_NAME_ADAFACTOR: _ClassVar[OptimizerName]
    OPTIMIZER_NAME_SGD: _ClassVar[OptimizerName]

class Objective(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OBJECTIVE_UNSPECIFIED: _ClassVar[Objective]
    OBJECTIVE_CHEAPEST: _ClassVar[Objective]
    OBJECTIVE_HOURLY: _ClassVar[Objective]
    OBJECTIVE_FASTEST: _ClassVar[Objective]
    OBJECTIVE_BALANCED: _ClassVar[Objective]

class SpotUse(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPOT_USE_UNSPECIFIED: _ClassVar[SpotUse]
    SPOT_USE_ALLOWED: _ClassVar[SpotUse]
    SPOT_USE_NEVER: _ClassVar[SpotUse]
    SPOT_USE_ONLY: _ClassVar[SpotUse]

class RetryCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RETRY_CAUSE_UNSPECIFIED: _ClassVar[RetryCause]
    RETRY_CAUSE_PREEMPTED: _ClassVar[RetryCause]
    RETRY_CAUSE_LOST: _ClassVar[RetryCause]
    RETRY_CAUSE_NO_CAPACITY: _ClassVar[RetryCause]
    RETRY_CAUSE_REJECTED: _ClassVar[RetryCause]
    RETRY_CAUSE_MISMATCH: _ClassVar[RetryCause]
    RETRY_CAUSE_HUNG: _ClassVar[RetryCause]
    RETRY_CAUSE_DEADMAN: _ClassVar[RetryCause]
    RETRY_CAUSE_INFRASTRUCTURE: _ClassVar[RetryCause]
    RETRY_CAUSE_OOM: _ClassVar[RetryCause]
IDLE_ACTION_UNSPECIFIED: IdleAction
IDLE_ACTION_NOTIFY: IdleAction
IDLE_ACTION_DRAIN: IdleAction
IDLE_ACTION_END: IdleAction
WANDB_MODE_UNSPECIFIED: WandbMode
WANDB_MODE_ONLINE: WandbMode
WANDB_MODE_OFFLINE: WandbMode
TASK_UNSPECIFIED: Task
TASK_CAUSAL_LM: Task
TASK_TEXT_CLASSIFICATION: Task
TASK_TEXT_REGRESSION: Task
TASK_TOKEN_CLASSIFICATION: Task
TASK_SEQ2SEQ: Task
TASK_DPO: Task
TASK_REWARD_MODEL: Task
TASK_IMAGE_CLASSIFICATION: Task
TASK_TEXT_TO_IMAGE: Task
TASK_ORPO: Task
TASK_KTO: Task
PRECISION_UNSPECIFIED: Precision
PRECISION_AUTO: Precision
PRECISION_BF16: Precision
PRECISION_FP16: Precision
PRECISION_FP32: Precision
LEARNED_ANSWERS_UNSPECIFIED: LearnedAnswers
LEARNED_ANSWERS_ALL: LearnedAnswers
LEARNED_ANSWERS_LAST: LearnedAnswers
LEARNED_ANSWERS_SPLIT: LearnedAnswers
DATA_FORMAT_UNSPECIFIED: DataFormat
DATA_FORMAT_CSV: DataFormat
DATA_FORMAT_JSON: DataFormat
DATA_FORMAT_JSONL: DataFormat
DATA_FORMAT_TAR: DataFormat
DATA_FORMAT_ZIP: DataFormat
DATA_FORMAT_PARQUET: DataFormat
LORA_TARGETS_UNSPECIFIED: LoraTargets
LORA_TARGETS_ALL_LINEAR: LoraTargets
LORA_TARGETS_ATTENTION: LoraTargets
ATTENTION_UNSPECIFIED: Attention
ATTENTION_AUTO: Attention
ATTENTION_SDPA: Attention
ATTENTION_FLASH: Attention
ATTENTION_EAGER: Attention
OPTIMIZER_NAME_UNSPECIFIED: OptimizerName
OPTIMIZER_NAME_ADAMW: OptimizerName
OPTIMIZER_NAME_ADAMW_8BIT: OptimizerName
OPTIMIZER_NAME_ADAFACTOR: OptimizerName
OPTIMIZER_NAME_SGD: OptimizerName
OBJECTIVE_UNSPECIFIED: Objective
OBJECTIVE_CHEAPEST: Objective
OBJECTIVE_HOURLY: Objective
OBJECTIVE_FASTEST: Objective
OBJECTIVE_BALANCED: Objective
SPOT_USE_UNSPECIFIED: SpotUse
SPOT_USE_ALLOWED: SpotUse
SPOT_USE_NEVER: SpotUse
SPOT_USE_ONLY: SpotUse
RETRY_CAUSE_UNSPECIFIED: RetryCause
RETRY_CAUSE_PREEMPTED: RetryCause
RETRY_CAUSE_LOST: RetryCause
RETRY_CAUSE_NO_CAPACITY: RetryCause
RETRY_CAUSE_REJECTED: RetryCause
RETRY_CAUSE_MISMATCH: RetryCause
RETRY_CAUSE_HUNG: RetryCause
RETRY_CAUSE_DEADMAN: RetryCause
RETRY_CAUSE_INFRASTRUCTURE: RetryCause
RETRY_CAUSE_OOM: RetryCause

class JobSpec(_message.Message):
    __slots__ = ("name", "cap_usd", "train", "script", "resources", "checkpoint", "retry", "env", "secrets", "labels", "init_from", "keep_on_failure", "deadline", "max_duration", "retention", "idle", "priority", "hour_worth_usd")
    class EnvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    CAP_USD_FIELD_NUMBER: _ClassVar[int]
    TRAIN_FIELD_NUMBER: _ClassVar[int]
    SCRIPT_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    SECRETS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    INIT_FROM_FIELD_NUMBER: _ClassVar[int]
    KEEP_ON_FAILURE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    MAX_DURATION_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    HOUR_WORTH_USD_FIELD_NUMBER: _ClassVar[int]
    name: str
    cap_usd: str
    train: TrainConfig
    script: ScriptConfig
    resources: Resources
    checkpoint: CheckpointConfig
    retry: Retry
    env: _containers.ScalarMap[str, str]
    secrets: _containers.RepeatedScalarFieldContainer[str]
    labels: _containers.ScalarMap[str, str]
    init_from: str
    keep_on_failure: int
    deadline: _timestamp_pb2.Timestamp
    max_duration: int
    retention: Retention
    idle: IdlePolicy
    priority: int
    hour_worth_usd: str
    def __init__(self, name: _Optional[str] = ..., cap_usd: _Optional[str] = ..., train: _Optional[_Union[TrainConfig, _Mapping]] = ..., script: _Optional[_Union[ScriptConfig, _Mapping]] = ..., resources: _Optional[_Union[Resources, _Mapping]] = ..., checkpoint: _Optional[_Union[CheckpointConfig, _Mapping]] = ..., retry: _Optional[_Union[Retry, _Mapping]] = ..., env: _Optional[_Mapping[str, str]] = ..., secrets: _Optional[_Iterable[str]] = ..., labels: _Optional[_Mapping[str, str]] = ..., init_from: _Optional[str] = ..., keep_on_failure: _Optional[int] = ..., deadline: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., max_duration: _Optional[int] = ..., retention: _Optional[_Union[Retention, _Mapping]] = ..., idle: _Optional[_Union[IdlePolicy, _Mapping]] = ..., priority: _Optional[int] = ..., hour_worth_usd: _Optional[str] = ...) -> None: ...

class Retention(_message.Message):
    __slots__ = ("artifacts_days", "checkpoints_days", "logs_days", "data_days")
    ARTIFACTS_DAYS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_DAYS_FIELD_NUMBER: _ClassVar[int]
    LOGS_DAYS_FIELD_NUMBER: _ClassVar[int]
    DATA_DAYS_FIELD_NUMBER: _ClassVar[int]
    artifacts_days: float
    checkpoints_days: float
    logs_days: float
    data_days: float
    def __init__(self, artifacts_days: _Optional[float] = ..., checkpoints_days: _Optional[float] = ..., logs_days: _Optional[float] = ..., data_days: _Optional[float] = ...) -> None: ...

class IdlePolicy(_message.Message):
    __slots__ = ("action", "gpu_below", "window_s", "no_progress_s", "download_action", "download_s")
    ACTION_FIELD_NUMBER: _ClassVar[int]
    GPU_BELOW_FIELD_NUMBER: _ClassVar[int]
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    NO_PROGRESS_S_FIELD_NUMBER: _ClassVar[int]
    DOWNLOAD_ACTION_FIELD_NUMBER: _ClassVar[int]
    DOWNLOAD_S_FIELD_NUMBER: _ClassVar[int]
    action: IdleAction
    gpu_below: float
    window_s: int
    no_progress_s: int
    download_action: IdleAction
    download_s: int
    def __init__(self, action: _Optional[_Union[IdleAction, str]] = ..., gpu_below: _Optional[float] = ..., window_s: _Optional[int] = ..., no_progress_s: _Optional[int] = ..., download_action: _Optional[_Union[IdleAction, str]] = ..., download_s: _Optional[int] = ...) -> None: ...

class TrainConfig(_message.Message):
    __slots__ = ("task", "model", "data", "lora", "full", "qlora", "optim", "epochs", "max_steps", "global_batch", "micro_batch", "max_length", "precision", "gradient_checkpointing", "seed", "eval_every_steps", "samples", "packing", "dpo", "diffusion", "orpo", "kto", "tf32", "compile", "fp8", "attention", "revision", "trust_remote_code", "guard", "selection", "output", "metrics")
    TASK_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    QLORA_FIELD_NUMBER: _ClassVar[int]
    OPTIM_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_BATCH_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCH_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_CHECKPOINTING_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    EVAL_EVERY_STEPS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PACKING_FIELD_NUMBER: _ClassVar[int]
    DPO_FIELD_NUMBER: _ClassVar[int]
    DIFFUSION_FIELD_NUMBER: _ClassVar[int]
    ORPO_FIELD_NUMBER: _ClassVar[int]
    KTO_FIELD_NUMBER: _ClassVar[int]
    TF32_FIELD_NUMBER: _ClassVar[int]
    COMPILE_FIELD_NUMBER: _ClassVar[int]
    FP8_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    TRUST_REMOTE_CODE_FIELD_NUMBER: _ClassVar[int]
    GUARD_FIELD_NUMBER: _ClassVar[int]
    SELECTION_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    task: Task
    model: str
    data: DataConfig
    lora: LoraConfig
    full: FullConfig
    qlora: QloraConfig
    optim: OptimConfig
    epochs: float
    max_steps: int
    global_batch: int
    micro_batch: int
    max_length: int
    precision: Precision
    gradient_checkpointing: bool
    seed: int
    eval_every_steps: int
    samples: SamplesConfig
    packing: bool
    dpo: DpoConfig
    diffusion: DiffusionConfig
    orpo: OrpoConfig
    kto: KtoConfig
    tf32: bool
    compile: bool
    fp8: bool
    attention: Attention
    revision: str
    trust_remote_code: bool
    guard: GuardConfig
    selection: SelectionConfig
    output: OutputConfig
    metrics: MetricsConfig
    def __init__(self, task: _Optional[_Union[Task, str]] = ..., model: _Optional[str] = ..., data: _Optional[_Union[DataConfig, _Mapping]] = ..., lora: _Optional[_Union[LoraConfig, _Mapping]] = ..., full: _Optional[_Union[FullConfig, _Mapping]] = ..., qlora: _Optional[_Union[QloraConfig, _Mapping]] = ..., optim: _Optional[_Union[OptimConfig, _Mapping]] = ..., epochs: _Optional[float] = ..., max_steps: _Optional[int] = ..., global_batch: _Optional[int] = ..., micro_batch: _Optional[int] = ..., max_length: _Optional[int] = ..., precision: _Optional[_Union[Precision, str]] = ..., gradient_checkpointing: _Optional[bool] = ..., seed: _Optional[int] = ..., eval_every_steps: _Optional[int] = ..., samples: _Optional[_Union[SamplesConfig, _Mapping]] = ..., packing: _Optional[bool] = ..., dpo: _Optional[_Union[DpoConfig, _Mapping]] = ..., diffusion: _Optional[_Union[DiffusionConfig, _Mapping]] = ..., orpo: _Optional[_Union[OrpoConfig, _Mapping]] = ..., kto: _Optional[_Union[KtoConfig, _Mapping]] = ..., tf32: _Optional[bool] = ..., compile: _Optional[bool] = ..., fp8: _Optional[bool] = ..., attention: _Optional[_Union[Attention, str]] = ..., revision: _Optional[str] = ..., trust_remote_code: _Optional[bool] = ..., guard: _Optional[_Union[GuardConfig, _Mapping]] = ..., selection: _Optional[_Union[SelectionConfig, _Mapping]] = ..., output: _Optional[_Union[OutputConfig, _Mapping]] = ..., metrics: _Optional[_Union[MetricsConfig, _Mapping]] = ...) -> None: ...

class MetricsConfig(_message.Message):
    __slots__ = ("wandb", "mlflow")
    WANDB_FIELD_NUMBER: _ClassVar[int]
    MLFLOW_FIELD_NUMBER: _ClassVar[int]
    wandb: WandbConfig
    mlflow: MlflowConfig
    def __init__(self, wandb: _Optional[_Union[WandbConfig, _Mapping]] = ..., mlflow: _Optional[_Union[MlflowConfig, _Mapping]] = ...) -> None: ...

class WandbConfig(_message.Message):
    __slots__ = ("project", "entity", "mode", "secret")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    ENTITY_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    project: str
    entity: str
    mode: WandbMode
    secret: str
    def __init__(self, project: _Optional[str] = ..., entity: _Optional[str] = ..., mode: _Optional[_Union[WandbMode, str]] = ..., secret: _Optional[str] = ...) -> None: ...

class MlflowConfig(_message.Message):
    __slots__ = ("uri", "experiment", "secret")
    URI_FIELD_NUMBER: _ClassVar[int]
    EXPERIMENT_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    uri: str
    experiment: str
    secret: str
    def __init__(self, uri: _Optional[str] = ..., experiment: _Optional[str] = ..., secret: _Optional[str] = ...) -> None: ...

class OutputConfig(_message.Message):
    __slots__ = ("merge", "push", "copy_to")
    MERGE_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    COPY_TO_FIELD_NUMBER: _ClassVar[int]
    merge: bool
    push: PushConfig
    copy_to: CopyConfig
    def __init__(self, merge: _Optional[bool] = ..., push: _Optional[_Union[PushConfig, _Mapping]] = ..., copy_to: _Optional[_Union[CopyConfig, _Mapping]] = ...) -> None: ...

class PushConfig(_message.Message):
    __slots__ = ("repo", "private", "secret")
    REPO_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    repo: str
    private: bool
    secret: str
    def __init__(self, repo: _Optional[str] = ..., private: _Optional[bool] = ..., secret: _Optional[str] = ...) -> None: ...

class CopyConfig(_message.Message):
    __slots__ = ("url", "secret")
    URL_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    url: str
    secret: str
    def __init__(self, url: _Optional[str] = ..., secret: _Optional[str] = ...) -> None: ...

class GuardConfig(_message.Message):
    __slots__ = ("skip", "rollbacks", "back_steps", "deviations")
    SKIP_FIELD_NUMBER: _ClassVar[int]
    ROLLBACKS_FIELD_NUMBER: _ClassVar[int]
    BACK_STEPS_FIELD_NUMBER: _ClassVar[int]
    DEVIATIONS_FIELD_NUMBER: _ClassVar[int]
    skip: int
    rollbacks: int
    back_steps: int
    deviations: float
    def __init__(self, skip: _Optional[int] = ..., rollbacks: _Optional[int] = ..., back_steps: _Optional[int] = ..., deviations: _Optional[float] = ...) -> None: ...

class SelectionConfig(_message.Message):
    __slots__ = ("metric", "patience", "min_delta", "best")
    METRIC_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_FIELD_NUMBER: _ClassVar[int]
    MIN_DELTA_FIELD_NUMBER: _ClassVar[int]
    BEST_FIELD_NUMBER: _ClassVar[int]
    metric: str
    patience: int
    min_delta: float
    best: bool
    def __init__(self, metric: _Optional[str] = ..., patience: _Optional[int] = ..., min_delta: _Optional[float] = ..., best: _Optional[bool] = ...) -> None: ...

class DataConfig(_message.Message):
    __slots__ = ("path", "format", "prompt", "completion", "eval_share", "messages", "label", "labels", "words", "chosen", "rejected", "bad_share", "image", "secret", "learn")
    PATH_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    EVAL_SHARE_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    BAD_SHARE_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    LEARN_FIELD_NUMBER: _ClassVar[int]
    path: str
    format: DataFormat
    prompt: str
    completion: str
    eval_share: float
    messages: str
    label: str
    labels: _containers.RepeatedScalarFieldContainer[str]
    words: str
    chosen: str
    rejected: str
    bad_share: float
    image: str
    secret: str
    learn: LearnedAnswers
    def __init__(self, path: _Optional[str] = ..., format: _Optional[_Union[DataFormat, str]] = ..., prompt: _Optional[str] = ..., completion: _Optional[str] = ..., eval_share: _Optional[float] = ..., messages: _Optional[str] = ..., label: _Optional[str] = ..., labels: _Optional[_Iterable[str]] = ..., words: _Optional[str] = ..., chosen: _Optional[str] = ..., rejected: _Optional[str] = ..., bad_share: _Optional[float] = ..., image: _Optional[str] = ..., secret: _Optional[str] = ..., learn: _Optional[_Union[LearnedAnswers, str]] = ...) -> None: ...

class LoraConfig(_message.Message):
    __slots__ = ("r", "alpha", "dropout", "targets", "targets_named", "rslora", "dora")
    R_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    DROPOUT_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    TARGETS_NAMED_FIELD_NUMBER: _ClassVar[int]
    RSLORA_FIELD_NUMBER: _ClassVar[int]
    DORA_FIELD_NUMBER: _ClassVar[int]
    r: int
    alpha: int
    dropout: float
    targets: LoraTargets
    targets_named: _containers.RepeatedScalarFieldContainer[str]
    rslora: bool
    dora: bool
    def __init__(self, r: _Optional[int] = ..., alpha: _Optional[int] = ..., dropout: _Optional[float] = ..., targets: _Optional[_Union[LoraTargets, str]] = ..., targets_named: _Optional[_Iterable[str]] = ..., rslora: _Optional[bool] = ..., dora: _Optional[bool] = ...) -> None: ...

class QloraConfig(_message.Message):
    __slots__ = ("r", "alpha", "dropout", "targets", "targets_named", "rslora", "dora", "bits")
    R_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    DROPOUT_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    TARGETS_NAMED_FIELD_NUMBER: _ClassVar[int]
    RSLORA_FIELD_NUMBER: _ClassVar[int]
    DORA_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    r: int
    alpha: int
    dropout: float
    targets: LoraTargets
    targets_named: _containers.RepeatedScalarFieldContainer[str]
    rslora: bool
    dora: bool
    bits: int
    def __init__(self, r: _Optional[int] = ..., alpha: _Optional[int] = ..., dropout: _Optional[float] = ..., targets: _Optional[_Union[LoraTargets, str]] = ..., targets_named: _Optional[_Iterable[str]] = ..., rslora: _Optional[bool] = ..., dora: _Optional[bool] = ..., bits: _Optional[int] = ...) -> None: ...

class FullConfig(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OptimConfig(_message.Message):
    __slots__ = ("lr", "weight_decay", "warmup_share", "clip_norm", "beta1", "beta2", "name")
    LR_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    WARMUP_SHARE_FIELD_NUMBER: _ClassVar[int]
    CLIP_NORM_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    lr: float
    weight_decay: float
    warmup_share: float
    clip_norm: float
    beta1: float
    beta2: float
    name: OptimizerName
    def __init__(self, lr: _Optional[float] = ..., weight_decay: _Optional[float] = ..., warmup_share: _Optional[float] = ..., clip_norm: _Optional[float] = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., name: _Optional[_Union[OptimizerName, str]] = ...) -> None: ...

class DpoConfig(_message.Message):
    __slots__ = ("beta",)
    BETA_FIELD_NUMBER: _ClassVar[int]
    beta: float
    def __init__(self, beta: _Optional[float] = ...) -> None: ...

class OrpoConfig(_message.Message):
    __slots__ = ("beta",)
    BETA_FIELD_NUMBER: _ClassVar[int]
    beta: float
    def __init__(self, beta: _Optional[float] = ...) -> None: ...

class KtoConfig(_message.Message):
    __slots__ = ("beta", "desirable_weight", "undesirable_weight")
    BETA_FIELD_NUMBER: _ClassVar[int]
    DESIRABLE_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    UNDESIRABLE_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    beta: float
    desirable_weight: float
    undesirable_weight: float
    def __init__(self, beta: _Optional[float] = ..., desirable_weight: _Optional[float] = ..., undesirable_weight: _Optional[float] = ...) -> None: ...

class DiffusionConfig(_message.Message):
    __slots__ = ("resolution", "min_snr", "cache", "sample_steps")
    RESOLUTION_FIELD_NUMBER: _ClassVar[int]
    MIN_SNR_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_STEPS_FIELD_NUMBER: _ClassVar[int]
    resolution: int
    min_snr: float
    cache: bool
    sample_steps: int
    def __init__(self, resolution: _Optional[int] = ..., min_snr: _Optional[float] = ..., cache: _Optional[bool] = ..., sample_steps: _Optional[int] = ...) -> None: ...

class SamplesConfig(_message.Message):
    __slots__ = ("prompts", "max_new_tokens")
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedScalarFieldContainer[str]
    max_new_tokens: int
    def __init__(self, prompts: _Optional[_Iterable[str]] = ..., max_new_tokens: _Optional[int] = ...) -> None: ...

class ScriptConfig(_message.Message):
    __slots__ = ("code", "command", "checkpoints", "setup", "setup_timeout_s", "requirements", "image")
    CODE_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    SETUP_FIELD_NUMBER: _ClassVar[int]
    SETUP_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    REQUIREMENTS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    code: str
    command: _containers.RepeatedScalarFieldContainer[str]
    checkpoints: bool
    setup: _containers.RepeatedScalarFieldContainer[str]
    setup_timeout_s: int
    requirements: str
    image: str
    def __init__(self, code: _Optional[str] = ..., command: _Optional[_Iterable[str]] = ..., checkpoints: _Optional[bool] = ..., setup: _Optional[_Iterable[str]] = ..., setup_timeout_s: _Optional[int] = ..., requirements: _Optional[str] = ..., image: _Optional[str] = ...) -> None: ...

class Resources(_message.Message):
    __slots__ = ("gpus", "nodes", "accelerators", "providers", "regions", "spot", "max_usd_per_hour", "aws", "trust", "objective", "cpus", "memory_gb", "disk_gb")
    GPUS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    ACCELERATORS_FIELD_NUMBER: _ClassVar[int]
    PROVIDERS_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    SPOT_FIELD_NUMBER: _ClassVar[int]
    MAX_USD_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    AWS_FIELD_NUMBER: _ClassVar[int]
    TRUST_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVE_FIELD_NUMBER: _ClassVar[int]
    CPUS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_GB_FIELD_NUMBER: _ClassVar[int]
    DISK_GB_FIELD_NUMBER: _ClassVar[int]
    gpus: int
    nodes: int
    accelerators: _containers.RepeatedScalarFieldContainer[str]
    providers: _containers.RepeatedScalarFieldContainer[str]
    regions: _containers.RepeatedScalarFieldContainer[str]
    spot: SpotUse
    max_usd_per_hour: str
    aws: AwsOptions
    trust: _offer_pb2.Trust
    objective: Objective
    cpus: int
    memory_gb: int
    disk_gb: int
    def __init__(self, gpus: _Optional[int] = ..., nodes: _Optional[int] = ..., accelerators: _Optional[_Iterable[str]] = ..., providers: _Optional[_Iterable[str]] = ..., regions: _Optional[_Iterable[str]] = ..., spot: _Optional[_Union[SpotUse, str]] = ..., max_usd_per_hour: _Optional[str] = ..., aws: _Optional[_Union[AwsOptions, _Mapping]] = ..., trust: _Optional[_Union[_offer_pb2.Trust, str]] = ..., objective: _Optional[_Union[Objective, str]] = ..., cpus: _Optional[int] = ..., memory_gb: _Optional[int] = ..., disk_gb: _Optional[int] = ...) -> None: ...

class AwsOptions(_message.Message):
    __slots__ = ("vpc", "subnets", "encrypted_volume", "kms_key")
    VPC_FIELD_NUMBER: _ClassVar[int]
    SUBNETS_FIELD_NUMBER: _ClassVar[int]
    ENCRYPTED_VOLUME_FIELD_NUMBER: _ClassVar[int]
    KMS_KEY_FIELD_NUMBER: _ClassVar[int]
    vpc: str
    subnets: _containers.RepeatedScalarFieldContainer[str]
    encrypted_volume: bool
    kms_key: str
    def __init__(self, vpc: _Optional[str] = ..., subnets: _Optional[_Iterable[str]] = ..., encrypted_volume: _Optional[bool] = ..., kms_key: _Optional[str] = ...) -> None: ...

class CheckpointConfig(_message.Message):
    __slots__ = ("every_s", "keep", "keep_every")
    EVERY_S_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    KEEP_EVERY_FIELD_NUMBER: _ClassVar[int]
    every_s: float
    keep: int
    keep_every: int
    def __init__(self, every_s: _Optional[float] = ..., keep: _Optional[int] = ..., keep_every: _Optional[int] = ...) -> None: ...

class Retry(_message.Message):
    __slots__ = ("max", "on")
    MAX_FIELD_NUMBER: _ClassVar[int]
    ON_FIELD_NUMBER: _ClassVar[int]
    max: int
    on: RetryCauses
    def __init__(self, max: _Optional[int] = ..., on: _Optional[_Union[RetryCauses, _Mapping]] = ...) -> None: ...

class RetryCauses(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedScalarFieldContainer[RetryCause]
    def __init__(self, items: _Optional[_Iterable[_Union[RetryCause, str]]] = ...) -> None: ...

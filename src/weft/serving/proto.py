"""The messages of the protocol's gRPC service, built at import time from the tables below.

They are in a descriptor pool of their own, because clients of the protocol in the same process register the same names
in the default pool. Numbers and types of fields are those of the protocol, so the encoded bytes are the same.
``ModelConfig`` has only the fields that this server sets.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"

_FILE = "weft/open_inference.proto"

_MESSAGES = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "1 bool live",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "1 bool ready",
    "ModelReadyRequest": "1 string name, 2 string version",
    "ModelReadyResponse": "1 bool ready",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "1 string name, 2 string version, 3 string* extensions",
    "ModelMetadataRequest": "1 string name, 2 string version",
    "ModelMetadataResponse": """1 string name, 2 string* versions, 3 string platform,
        4 ModelMetadataResponse.TensorMetadata* inputs, 5 ModelMetadataResponse.TensorMetadata* outputs""",
    "ModelMetadataResponse.TensorMetadata": "1 string name, 2 string datatype, 3 int64* shape",
    "InferParameter": """1 bool bool_param|parameter_choice, 2 int64 int64_param|parameter_choice,
        3 string string_param|parameter_choice, 4 double double_param|parameter_choice,
        5 uint64 uint64_param|parameter_choice""",
    "InferTensorContents": """1 bool* bool_contents, 2 int32* int_contents, 3 int64* int64_contents,
        4 uint32* uint_contents, 5 uint64* uint64_contents, 6 float* fp32_contents, 7 double* fp64_contents,
        8 bytes* bytes_contents""",
    "ModelInferRequest": """1 string model_name, 2 string model_version, 3 string id, 4 {InferParameter} parameters,
        5 ModelInferRequest.InferInputTensor* inputs, 6 ModelInferRequest.InferRequestedOutputTensor* outputs,
        7 bytes* raw_input_contents""",
    "ModelInferRequest.InferInputTensor": """1 string name, 2 string datatype, 3 int64* shape,
        4 {InferParameter} parameters, 5 InferTensorContents contents""",
    "ModelInferRequest.InferRequestedOutputTensor": "1 string name, 2 {InferParameter} parameters",
    "ModelInferResponse": """1 string model_name, 2 string model_version, 3 string id, 4 {InferParameter} parameters,
        5 ModelInferResponse.InferOutputTensor* outputs, 6 bytes* raw_output_contents""",
    "ModelInferResponse.InferOutputTensor": """1 string name, 2 string datatype, 3 int64* shape,
        4 {InferParameter} parameters, 5 InferTensorContents contents""",
    "ModelStreamInferResponse": "1 string error_message, 2 ModelInferResponse infer_response",
    "ModelConfigRequest": "1 string name, 2 string version",
    "ModelConfigResponse": "1 ModelConfig config",
    "ModelStatisticsRequest": "1 string name, 2 string version",
    "ModelStatisticsResponse": "1 ModelStatistics* model_stats",
    "ModelStatistics": """1 string name, 2 string version, 3 uint64 last_inference, 4 uint64 inference_count,
        5 uint64 execution_count, 6 InferStatistics inference_stats, 7 InferBatchStatistics* batch_stats,
        8 MemoryUsage* memory_usage, 9 {InferResponseStatistics} response_stats""",
    "StatisticDuration": "1 uint64 count, 2 uint64 ns",
    "InferStatistics": """1 StatisticDuration success, 2 StatisticDuration fail, 3 StatisticDuration queue,
        4 StatisticDuration compute_input, 5 StatisticDuration compute_infer, 6 StatisticDuration compute_output,
        7 StatisticDuration cache_hit, 8 StatisticDuration cache_miss""",
    "InferResponseStatistics": """1 StatisticDuration compute_infer, 2 StatisticDuration compute_output,
        3 StatisticDuration success, 4 StatisticDuration fail, 5 StatisticDuration empty_response,
        6 StatisticDuration cancel""",
    "InferBatchStatistics": """1 uint64 batch_size, 2 StatisticDuration compute_input,
        3 StatisticDuration compute_infer, 4 StatisticDuration compute_output""",
    "MemoryUsage": "1 string type, 2 int64 id, 3 uint64 byte_size",
    "RepositoryIndexRequest": "1 string repository_name, 2 bool ready",
    "RepositoryIndexResponse": "1 RepositoryIndexResponse.ModelIndex* models",
    "RepositoryIndexResponse.ModelIndex": "1 string name, 2 string version, 3 string state, 4 string reason",
    "ModelRepositoryParameter": """1 bool bool_param|parameter_choice, 2 int64 int64_param|parameter_choice,
        3 string string_param|parameter_choice, 4 bytes bytes_param|parameter_choice""",
    "RepositoryModelLoadRequest": """1 string repository_name, 2 string model_name,
        3 {ModelRepositoryParameter} parameters""",
    "RepositoryModelLoadResponse": "",
    "RepositoryModelUnloadRequest": """1 string repository_name, 2 string model_name,
        3 {ModelRepositoryParameter} parameters""",
    "RepositoryModelUnloadResponse": "",
    "TraceSettingRequest": "1 {TraceSettingRequest.SettingValue} settings, 2 string model_name",
    "TraceSettingRequest.SettingValue": "1 string* value",
    "TraceSettingResponse": "1 {TraceSettingResponse.SettingValue} settings",
    "TraceSettingResponse.SettingValue": "1 string* value",
    "LogSettingsRequest": "1 {LogSettingsRequest.SettingValue} settings",
    "LogSettingsRequest.SettingValue": """1 bool bool_param|parameter_choice, 2 uint32 uint32_param|parameter_choice,
        3 string string_param|parameter_choice""",
    "LogSettingsResponse": "1 {LogSettingsResponse.SettingValue} settings",
    "LogSettingsResponse.SettingValue": """1 bool bool_param|parameter_choice, 2 uint32 uint32_param|parameter_choice,
        3 string string_param|parameter_choice""",
    "SystemSharedMemoryStatusRequest": "1 string name",
    "SystemSharedMemoryStatusResponse": "1 {SystemSharedMemoryStatusResponse.RegionStatus} regions",
    "SystemSharedMemoryStatusResponse.RegionStatus": "1 string name, 2 string key, 3 uint64 offset, 4 uint64 byte_size",
    "SystemSharedMemoryRegisterRequest": "1 string name, 2 string key, 3 uint64 offset, 4 uint64 byte_size",
    "SystemSharedMemoryRegisterResponse": "",
    "SystemSharedMemoryUnregisterRequest": "1 string name",
    "SystemSharedMemoryUnregisterResponse": "",
    "CudaSharedMemoryStatusRequest": "1 string name",
    "CudaSharedMemoryStatusResponse": "1 {CudaSharedMemoryStatusResponse.RegionStatus} regions",
    "CudaSharedMemoryStatusResponse.RegionStatus": "1 string name, 2 uint64 device_id, 3 uint64 byte_size",
    "CudaSharedMemoryRegisterRequest": "1 string name, 2 bytes raw_handle, 3 int64 device_id, 4 uint64 byte_size",
    "CudaSharedMemoryRegisterResponse": "",
    "CudaSharedMemoryUnregisterRequest": "1 string name",
    "CudaSharedMemoryUnregisterResponse": "",
    "ModelConfig": """1 string name, 2 string platform, 3 ModelVersionPolicy version_policy, 4 int32 max_batch_size,
        5 ModelInput* input, 6 ModelOutput* output, 7 ModelInstanceGroup* instance_group,
        8 string default_model_filename, 10 {string} metric_tags,
        11 ModelDynamicBatching dynamic_batching|scheduling_choice, 14 {ModelParameter} parameters, 17 string backend,
        19 ModelTransactionPolicy model_transaction_policy, 25 string runtime""",
    "ModelVersionPolicy": """1 ModelVersionPolicy.Latest latest|policy_choice,
        2 ModelVersionPolicy.All all|policy_choice, 3 ModelVersionPolicy.Specific specific|policy_choice""",
    "ModelVersionPolicy.Latest": "1 uint32 num_versions",
    "ModelVersionPolicy.All": "",
    "ModelVersionPolicy.Specific": "1 int64* versions",
    "ModelInput": "1 string name, 2 =DataType data_type, 3 =ModelInput.Format format, 4 int64* dims, 8 bool optional",
    "ModelOutput": "1 string name, 2 =DataType data_type, 3 int64* dims, 4 string label_filename",
    "ModelInstanceGroup": "1 string name, 2 int32 count, 3 int32* gpus, 4 =ModelInstanceGroup.Kind kind",
    "ModelDynamicBatching": """1 int32* preferred_batch_size, 2 uint64 max_queue_delay_microseconds,
        3 bool preserve_ordering, 4 uint64 priority_levels, 5 uint64 default_priority_level""",
    "ModelParameter": "1 string string_value",
    "ModelTransactionPolicy": "1 bool decoupled",
}
"""Message -> its fields: number, type, name. Type ``X*`` is repeated, ``{X}`` a map from strings to X, ``=X`` an
enumeration. ``name|choice``: the field belongs to the oneof *choice*."""

_ENUMERATIONS = {
    "DataType": """TYPE_INVALID TYPE_BOOL TYPE_UINT8 TYPE_UINT16 TYPE_UINT32 TYPE_UINT64 TYPE_INT8 TYPE_INT16
        TYPE_INT32 TYPE_INT64 TYPE_FP16 TYPE_FP32 TYPE_FP64 TYPE_STRING TYPE_BF16""",
    "ModelInput.Format": "FORMAT_NONE FORMAT_NHWC FORMAT_NCHW",
    "ModelInstanceGroup.Kind": "KIND_AUTO KIND_GPU KIND_CPU KIND_MODEL",
}
"""Enumeration -> its values, counted from zero."""

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "uint32": _Field.TYPE_UINT32,
    "uint64": _Field.TYPE_UINT64,
    "float": _Field.TYPE_FLOAT,
    "double": _Field.TYPE_DOUBLE,
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
}


def _build_file() -> Any:
    """Build the file descriptor of all messages from the tables."""
    file = descriptor_pb2.FileDescriptorProto(name=_FILE, package=PACKAGE, syntax="proto3")
    messages: dict[str, Any] = {}
    for path, fields in _MESSAGES.items():
        outer, _, name = path.rpartition(".")
        message = messages[path] = messages[outer].nested_type.add() if outer else file.message_type.add()
        message.name = name
        for field in filter(None, fields.split(",")):
            _add_field(message, path, *field.split())
    for path, values in _ENUMERATIONS.items():
        outer, _, name = path.rpartition(".")
        enumeration = messages[outer].enum_type.add() if outer else file.enum_type.add()
        enumeration.name = name
        for number, value in enumerate(values.split()):
            enumeration.value.add(name=value, number=number)
    return file


def _add_field(message: Any, path: str, number: str, type_text: str, name: str) -> None:
    """Add a field to the message *path*; number, type_text and name are as in ``_MESSAGES``.

    A map is a repeated field of messages with a key and a value, as in every .proto file.
    """
    name, _, choice = name.partition("|")
    field = message.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
    if type_text.startswith("{"):
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _add_field(entry, f"{path}.{entry.name}", "1", "string", "key")
        _add_field(entry, f"{path}.{entry.name}", "2", type_text.strip("{}"), "value")
        type_text = f"{path}.{entry.name}*"
    if type_text.endswith("*"):
        field.label = _Field.LABEL_REPEATED
    base_type = type_text.strip("*=")
    field.type = _SCALARS.get(base_type, _Field.TYPE_ENUM if type_text.startswith("=") else _Field.TYPE_MESSAGE)
    if base_type not in _SCALARS:
        field.type_name = f".{PACKAGE}.{base_type}"
    if choice:
        choices = [known.name for known in message.oneof_decl]
        if choice not in choices:
            message.oneof_decl.add(name=choice)
            choices.append(choice)
        field.oneof_index = choices.index(choice)


POOL = descriptor_pool.DescriptorPool()
POOL.AddSerializedFile(_build_file().SerializeToString())

CLASSES: dict[str, Any] = {
    name: message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))
    for name in _MESSAGES
    if "." not in name
}
"""Message -> its class, of which nested messages are attributes. The classes are attributes of this module, too."""

METHODS: dict[str, tuple[Any, Any, bool]] = {
    name: (CLASSES[f"{name}Request"], CLASSES[f"{name}Response"], False)
    for name in (message.removesuffix("Request") for message in CLASSES if message.endswith("Request"))
} | {"ModelStreamInfer": (CLASSES["ModelInferRequest"], CLASSES["ModelStreamInferResponse"], True)}
"""Call -> the classes of its request and its response, and whether it streams both of them."""


def __getattr__(name: str) -> Any:
    """Return the class of a message as an attribute of this module."""
    try:
        return CLASSES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None

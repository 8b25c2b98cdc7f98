"""Our gRPC messages against those of an independent client in the same process: same numbers, same bytes."""

from __future__ import annotations

from random import Random

import pytest
from google.protobuf import descriptor_pool, json_format
from google.protobuf.descriptor import FieldDescriptor
from tritonclient.grpc import model_config_pb2, service_pb2

from weft.serving import proto

PARTIAL = {
    "ModelConfig", "ModelVersionPolicy", "ModelInput", "ModelOutput", "ModelInstanceGroup", "ModelDynamicBatching",
    "ModelParameter", "ModelTransactionPolicy",
}  # fmt: skip
"""Messages of which we may hold only a part."""


def theirs(name: str):
    return getattr(service_pb2, name, None) or getattr(model_config_pb2, name)


def described(field: FieldDescriptor) -> tuple[object, ...]:
    kind = field.message_type or field.enum_type
    choice = field.containing_oneof
    packed = field.is_packed if field.is_repeated else None
    return field.number, field.type, field.is_repeated, packed, kind and kind.full_name, choice and choice.name


def compare(ours, other, partial: bool) -> None:
    mine = {field.name: described(field) for field in ours.fields}
    known = {field.name: described(field) for field in other.fields}
    assert mine == ({name: known[name] for name in mine} if partial else known)
    assert ours.GetOptions().map_entry == other.GetOptions().map_entry
    for inner in ours.nested_types:
        compare(inner, other.nested_types_by_name[inner.name], partial)
    for inner in ours.enum_types:
        compare_values(inner, other.enum_types_by_name[inner.name])


def compare_values(ours, other) -> None:
    assert {value.name: value.number for value in ours.values} == {value.name: value.number for value in other.values}


@pytest.mark.parametrize("name", proto.CLASSES)
def test_every_field_has_the_number_and_type_of_the_protocol(name):
    compare(proto.CLASSES[name].DESCRIPTOR, theirs(name).DESCRIPTOR, name in PARTIAL)


def test_data_types_have_the_numbers_of_the_protocol():
    ours = proto.POOL.FindEnumTypeByName("inference.DataType")
    compare_values(ours, model_config_pb2.DESCRIPTOR.enum_types_by_name["DataType"])


def test_methods_are_those_of_the_service():
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert service.full_name == proto.SERVICE
    for name, (request, response, streaming) in proto.METHODS.items():
        method = service.methods_by_name[name]
        assert request.DESCRIPTOR.full_name == method.input_type.full_name
        assert response.DESCRIPTOR.full_name == method.output_type.full_name
        assert streaming == method.server_streaming == method.client_streaming
    assert {"ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer"} < {
        *proto.METHODS
    }
    assert {name for name, (_, _, streaming) in proto.METHODS.items() if streaming} == {"ModelStreamInfer"}


def test_the_classes_live_in_a_pool_of_their_own():
    assert proto.ModelInferRequest.DESCRIPTOR.file.pool is proto.POOL
    assert proto.POOL is not descriptor_pool.Default()
    assert descriptor_pool.Default().FindMessageTypeByName("inference.ModelInferRequest") is (
        service_pb2.ModelInferRequest.DESCRIPTOR
    )


def test_classes_are_attributes_and_nothing_else_is():
    assert proto.ModelInferRequest is proto.CLASSES["ModelInferRequest"]
    with pytest.raises(AttributeError, match="NoSuchMessage"):
        _ = proto.NoSuchMessage


SCALARS = {
    FieldDescriptor.TYPE_BOOL: lambda random: True,
    FieldDescriptor.TYPE_INT32: lambda random: random.randint(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: lambda random: random.randint(-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: lambda random: random.randint(1, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: lambda random: random.randint(1, 2**64 - 1),
    FieldDescriptor.TYPE_FLOAT: lambda random: random.choice([0.5, -1.25, float("inf")]),
    FieldDescriptor.TYPE_DOUBLE: lambda random: random.random(),
    FieldDescriptor.TYPE_STRING: lambda random: f"ü{random.random()}",
    FieldDescriptor.TYPE_BYTES: lambda random: random.randbytes(5),
}


def value_of(field: FieldDescriptor, random: Random):
    if field.enum_type:
        return random.choice(field.enum_type.values).number
    return SCALARS[field.type](random)


def fill(message, random: Random) -> None:
    """Set every field, and one field of every choice."""
    chosen = {choice.name: random.choice(choice.fields).name for choice in message.DESCRIPTOR.oneofs}
    for field in message.DESCRIPTOR.fields:
        if field.containing_oneof and chosen[field.containing_oneof.name] != field.name:
            continue
        if field.message_type and field.message_type.GetOptions().map_entry:
            fill_map(getattr(message, field.name), field.message_type.fields_by_name, random)
        elif field.message_type and field.is_repeated:
            for _ in range(2):
                fill(getattr(message, field.name).add(), random)
        elif field.message_type:
            getattr(message, field.name).SetInParent()
            fill(getattr(message, field.name), random)
        elif field.is_repeated:
            getattr(message, field.name).extend([value_of(field, random) for _ in range(3)])
        else:
            setattr(message, field.name, value_of(field, random))


def fill_map(mapping, fields, random: Random) -> None:
    value = fields["value"]
    for key in ("a", "", "ключ") if fields["key"].type == FieldDescriptor.TYPE_STRING else (0, 7):
        if value.message_type:
            fill(mapping[key], random)
        else:
            mapping[key] = value_of(value, random)


def contents(message) -> dict[str, object]:
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=False
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", proto.CLASSES)
def test_a_message_survives_the_way_through_the_client(name, seed):
    message = proto.CLASSES[name]()
    fill(message, Random(seed))
    data = message.SerializeToString(deterministic=True)
    parsed = theirs(name).FromString(data)
    assert contents(parsed) == contents(message)
    back = proto.CLASSES[name].FromString(parsed.SerializeToString(deterministic=True))
    assert back == message
    assert bool(data) == bool(message.DESCRIPTOR.fields)


@pytest.mark.parametrize("name", sorted({*proto.CLASSES} - PARTIAL - {"ModelConfigResponse"}))
def test_a_message_of_the_client_is_understood_whole(name):
    message = theirs(name)()
    fill(message, Random(7))
    parsed = proto.CLASSES[name].FromString(message.SerializeToString())
    assert contents(parsed) == contents(message)


def test_what_we_do_not_know_of_a_configuration_is_skipped():
    message = model_config_pb2.ModelConfig()
    fill(message, Random(3))
    parsed = proto.ModelConfig.FromString(message.SerializeToString())
    assert (parsed.name, parsed.backend, parsed.max_batch_size) == (
        message.name,
        message.backend,
        message.max_batch_size,
    )
    assert [entry.name for entry in parsed.input] == [entry.name for entry in message.input]

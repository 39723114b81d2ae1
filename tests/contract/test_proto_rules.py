"""Rules of the wire contract, in the manner of buf's STANDARD, read off the descriptors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parents[2] / "protos"
PACKAGE = "kvbraid.v1"
SNAKE = re.compile(r"^[a-z][a-z0-9]*(_[a-z0-9]+)*$")
PASCAL = re.compile(r"^[A-Z][A-Za-z0-9]*$")

File = descriptor_pb2.FileDescriptorProto
Commented = tuple[str, tuple[int, ...]]

# Field numbers of descriptor.proto: where a comment is filed.
MESSAGE, ENUM, SERVICE = 4, 5, 6
FIELD, NESTED, NESTED_ENUM, ONEOF = 2, 3, 4, 8
VALUE = METHOD = 2


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[File]:
    target = tmp_path_factory.mktemp("descriptors") / "image.binpb"
    sources = sorted(str(path) for path in PROTOS.rglob("*.proto"))
    options = ["protoc", f"-I{PROTOS}", f"--descriptor_set_out={target}", "--include_source_info"]
    assert protoc.main([*options, *sources]) == 0
    return list(descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes()).file)


def messages(
    holder: File | descriptor_pb2.DescriptorProto, path: tuple[int, ...] = ()
) -> Iterator[tuple[descriptor_pb2.DescriptorProto, tuple[int, ...]]]:
    is_file = isinstance(holder, File)
    own = holder.message_type if isinstance(holder, File) else holder.nested_type
    for index, message in enumerate(own):
        here = (*path, MESSAGE if is_file else NESTED, index)
        yield message, here
        yield from messages(message, here)


def things_to_comment(file: File) -> Iterator[Commented]:
    for message, path in messages(file):
        if message.options.map_entry:
            continue
        yield message.name, path
        for index, field in enumerate(message.field):
            yield f"{message.name}.{field.name}", (*path, FIELD, index)
        for index, oneof in enumerate(message.oneof_decl):
            if not oneof.name.startswith("_"):  # the compiler's own, for `optional`
                yield f"{message.name}.{oneof.name}", (*path, ONEOF, index)
    for index, enum in enumerate(file.enum_type):
        yield enum.name, (ENUM, index)
        for number, value in enumerate(enum.value):
            yield value.name, (ENUM, index, VALUE, number)
    for index, service in enumerate(file.service):
        yield service.name, (SERVICE, index)
        for number, method in enumerate(service.method):
            yield f"{service.name}.{method.name}", (SERVICE, index, METHOD, number)


def test_everything_is_commented(files: list[File]) -> None:
    for file in files:
        locations = file.source_code_info.location
        commented = {tuple(place.path) for place in locations if place.leading_comments.strip()}
        missing = [name for name, path in things_to_comment(file) if path not in commented]
        assert not missing, f"{file.name}: no comment on {missing}"


def test_folder_is_package(files: list[File]) -> None:
    assert files
    for file in files:
        assert file.package == PACKAGE, file.name
        assert Path(file.name).parent.as_posix() == PACKAGE.replace(".", "/"), file.name
        assert file.syntax == "proto3", file.name


def test_services_end_in_service_and_health_is_the_standard_one(files: list[File]) -> None:
    for service in (service for file in files for service in file.service):
        assert service.name.endswith("Service"), service.name
        assert "Health" not in service.name, service.name


def test_every_call_has_its_own_request_and_response(files: list[File]) -> None:
    used: Counter[str] = Counter()
    for service in (service for file in files for service in file.service):
        for method in service.method:
            assert PASCAL.match(method.name), method.name
            assert method.input_type == f".{PACKAGE}.{method.name}Request", method.name
            assert method.output_type == f".{PACKAGE}.{method.name}Response", method.name
            used.update([method.input_type, method.output_type])
    assert [name for name, count in used.items() if count > 1] == []


def test_enums_start_with_unspecified_and_carry_their_name(files: list[File]) -> None:
    for enum in (enum for file in files for enum in file.enum_type):
        prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper() + "_"
        assert enum.value[0].number == 0, enum.name
        assert enum.value[0].name == f"{prefix}UNSPECIFIED"
        assert all(value.name.startswith(prefix) for value in enum.value), enum.name


def test_fields_are_snake_case(files: list[File]) -> None:
    for file in files:
        for message, _ in messages(file):
            for field in message.field:
                assert SNAKE.match(field.name), f"{message.name}.{field.name}"
                assert not re.search(r"(seconds|millis|duration|timeout)$", field.name), (
                    f"{message.name}.{field.name}: units are suffixes such as _ms, _us, _bytes"
                )


def test_sampling_fields_whose_zero_means_something_are_optional(files: list[File]) -> None:
    (sampling,) = [
        message
        for file in files
        for message, _ in messages(file)
        if message.name == "SamplingParams"
    ]
    optional = {field.name for field in sampling.field if field.proto3_optional}
    assert optional >= {"temperature", "top_k", "top_p", "min_p", "seed", "max_tokens"}

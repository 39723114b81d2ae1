"""docs/reference/grpc.md out of the protos and their comments."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

from kvbraid.errors import KVBraidError

_File = descriptor_pb2.FileDescriptorProto
_Message = descriptor_pb2.DescriptorProto
_Field = descriptor_pb2.FieldDescriptorProto
_Path = tuple[int, ...]

# Field numbers of descriptor.proto: where a comment is filed.
_MESSAGE, _ENUM, _SERVICE = 4, 5, 6
_FIELD = _VALUE = _METHOD = 2

_INTRODUCTION = """\
# gRPC reference

Generated from `protos/kvbraid/v1/*.proto` by `make gen-docs`; a test compares it. The package is
`kvbraid.v1`. Clients call [CoordinatorService](#coordinatorservice); the other services are spoken
between the roles. Every process also serves `grpc.health.v1.Health` (overall status and its role's
name, `Check` and `Watch`) and, unless `reflection` is off, gRPC reflection.

A call that fails carries `google.rpc.ErrorInfo` with domain `kvbraid` and one of these reasons in
its status details, an overload also `google.rpc.RetryInfo`:

"""


def grpc_reference(protos: Path) -> str:
    """The page for the .proto files below the folder `protos`."""
    files = _descriptors(protos)
    comments = {file.name: _comments(file) for file in files}
    parts = [_INTRODUCTION + _errors(), "## Services\n"]
    parts += [_service(f, n, comments[f.name]) for f in files for n in range(len(f.service))]
    parts.append("## Messages\n")
    parts += [_message(f, n, comments[f.name]) for f in files for n in range(len(f.message_type))]
    parts.append("## Enums\n")
    parts += [_enum(f, n, comments[f.name]) for f in files for n in range(len(f.enum_type))]
    return "\n".join(parts)


def _descriptors(protos: Path) -> list[_File]:
    """Every file of ours. The coordinator's first: it is the one that clients need."""
    with tempfile.TemporaryDirectory() as directory:
        image = Path(directory, "image.binpb")
        sources = sorted(str(path) for path in protos.rglob("*.proto"))
        options = [f"-I{protos}", f"--descriptor_set_out={image}", "--include_source_info"]
        code = protoc.main(["protoc", *options, *sources])
        if code != 0:
            raise RuntimeError(f"protoc exited with {code}")
        files = descriptor_pb2.FileDescriptorSet.FromString(image.read_bytes()).file
    return sorted(files, key=lambda file: ("coordinator" not in file.name, file.name))


def _comments(file: _File) -> dict[_Path, str]:
    return {
        tuple(place.path): " ".join(place.leading_comments.split())
        for place in file.source_code_info.location
    }


def _errors() -> str:
    rows = [
        (error.reason, error.grpc_code, str(error.http_status), _first_sentence(error))
        for error in KVBraidError.__subclasses__()
        if "reason" in vars(error)
    ]
    return _table(("reason", "gRPC status", "HTTP", "meaning"), rows)


def _first_sentence(error: type[KVBraidError]) -> str:
    return (error.__doc__ or "").split("\n")[0]


def _service(file: _File, index: int, comments: Mapping[_Path, str]) -> str:
    service = file.service[index]
    rows = [
        (
            f"`{method.name}`",
            _streamed(method.input_type, method.client_streaming),
            _streamed(method.output_type, method.server_streaming),
            comments.get((_SERVICE, index, _METHOD, number), ""),
        )
        for number, method in enumerate(service.method)
    ]
    text = comments.get((_SERVICE, index), "")
    table = _table(("call", "request", "response", "what it does"), rows)
    return f"### {service.name}\n\n{text} In `protos/{file.name}`.\n\n{table}"


def _streamed(type_name: str, is_stream: bool) -> str:
    return ("stream of " if is_stream else "") + _link(type_name)


def _message(file: _File, index: int, comments: Mapping[_Path, str]) -> str:
    message = file.message_type[index]
    maps = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    rows = [
        (
            str(field.number),
            f"`{field.name}`",
            _type(field, maps) + _place(field, message),
            comments.get((_MESSAGE, index, _FIELD, number), ""),
        )
        for number, field in enumerate(message.field)
    ]
    text = comments.get((_MESSAGE, index), "")
    body = _table(("number", "field", "type", "meaning"), rows) if rows else "No fields.\n"
    return f"### {message.name}\n\n{text}\n\n{body}"


def _type(field: _Field, maps: Mapping[str, _Message]) -> str:
    if (entry := maps.get(field.type_name.rpartition(".")[2])) is not None:
        key, value = entry.field
        return f"map of {_scalar(key)} to {_scalar(value)}"
    prefix = "repeated " if field.label == _Field.LABEL_REPEATED else ""
    return prefix + _scalar(field)


def _scalar(field: _Field) -> str:
    if field.type_name:
        return _link(field.type_name)
    return _Field.Type.Name(field.type).removeprefix("TYPE_").lower()


def _place(field: _Field, message: _Message) -> str:
    if field.proto3_optional:
        return ", optional"
    if field.HasField("oneof_index"):
        return f", one of `{message.oneof_decl[field.oneof_index].name}`"
    return ""


def _enum(file: _File, index: int, comments: Mapping[_Path, str]) -> str:
    enum = file.enum_type[index]
    rows = [
        (str(value.number), f"`{value.name}`", comments.get((_ENUM, index, _VALUE, number), ""))
        for number, value in enumerate(enum.value)
    ]
    text = comments.get((_ENUM, index), "")
    return f"### {enum.name}\n\n{text}\n\n{_table(('number', 'value', 'meaning'), rows)}"


def _link(type_name: str) -> str:
    name = type_name.rpartition(".")[2]
    return f"[{name}](#{name.lower()})"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join(_lines(head, rows)) + "\n"


def _lines(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |"

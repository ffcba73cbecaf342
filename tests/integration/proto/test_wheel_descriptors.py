"""Compares proto/ray/*.proto with the descriptors inside the real ray wheel.

Run with the Python of an environment that has the wheel: test_wheel_descriptors.py SOURCE_ROOT

 1. protoc compiles our files into a descriptor set.
 2. Ray's descriptors come from the wheel's Python modules, and for the files that have none
    (syncer, health) from the serialized descriptors inside the wheel's programs.
 3. Every message, field (name, number, type, label, presence, oneof), enum value and method path
    of ours must be Ray's. Every field of Ray's in a message of ours must be declared, or reserved
    under its name and number: nothing is left out silently.
 4. A difference is printed with its place; any difference, and a comparison that compared
    nothing, fails.
"""

import importlib
import importlib.util
import pathlib
import subprocess
import sys
import tempfile

from google.protobuf import descriptor_pb2 as pb

RAY_VERSION = "2.60.0"
MODULES = [
    "gcs_service_pb2",
    "autoscaler_pb2",
    "node_manager_pb2",
    "reporter_pb2",
    "pubsub_pb2",
    "core_worker_pb2",
    "logging_pb2",
]
# Files without a Python module: (program of the wheel, file name inside it).
EMBEDDED = [
    ("core/src/ray/raylet/raylet", "src/ray/protobuf/ray_syncer.proto"),
    ("core/src/ray/gcs/gcs_server", "src/proto/grpc/health/v1/health.proto"),
]


def our_files(root, work):
    out = work / "ours.pb"
    paths = sorted((root / "proto" / "ray").glob("*.proto"))
    subprocess.run(
        ["protoc", f"-I{root}", f"--descriptor_set_out={out}", *map(str, paths)], check=True
    )
    files = pb.FileDescriptorSet.FromString(out.read_bytes()).file
    assert len(files) == len(paths), "protoc left files out"
    return files


def wheel_files():
    files = {}

    def collect(descriptor):
        if descriptor.name in files:
            return
        proto = pb.FileDescriptorProto()
        descriptor.CopyToProto(proto)
        files[descriptor.name] = proto
        for dependency in descriptor.dependencies:
            collect(dependency)

    for name in MODULES:
        collect(importlib.import_module("ray.core.generated." + name).DESCRIPTOR)
    package = pathlib.Path(importlib.util.find_spec("ray").origin).parent
    for program, name in EMBEDDED:
        files[name] = embedded_file((package / program).read_bytes(), name)
    return list(files.values())


def read_varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def embedded_file(data, name):
    """The serialized FileDescriptorProto of `name` inside a program's bytes.

    It starts with field 1, the name. Its end is not marked, so fields are taken while they look
    like ones of FileDescriptorProto, up to `syntax` (12), which the compiler writes last.
    """
    start_mark = b"\n" + bytes([len(name)]) + name.encode()
    start = data.find(start_mark)
    while start >= 0:
        at = start
        while True:
            tag, value_at = read_varint(data, at)
            if tag & 7 != 2 or not 1 <= tag >> 3 <= 12:
                break
            length, value_at = read_varint(data, value_at)
            at = value_at + length
            if tag >> 3 == 12:
                return pb.FileDescriptorProto.FromString(data[start:at])
        start = data.find(start_mark, start + 1)
    raise AssertionError(f"no descriptor of {name} in the program")


class Index:
    """All messages, enums and methods of a set of files by full name."""

    def __init__(self, files):
        self.messages, self.enums, self.methods = {}, {}, {}
        for file in files:
            self._add("." + file.package, file.message_type, file.enum_type)
            for service in file.service:
                for method in service.method:
                    path = f"/{file.package}.{service.name}/{method.name}"
                    self.methods[path] = (
                        method.input_type,
                        method.output_type,
                        method.client_streaming,
                        method.server_streaming,
                    )

    def _add(self, scope, messages, enums):
        for enum in enums:
            self.enums[f"{scope}.{enum.name}"] = {v.name: v.number for v in enum.value}
        for message in messages:
            full_name = f"{scope}.{message.name}"
            self.messages[full_name] = message
            self._add(full_name, message.nested_type, message.enum_type)


def field_facts(message, field):
    """What must be equal. proto3 optional is a oneof "_name" of one member, as protoc itself says."""
    oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else None
    kind = pb.FieldDescriptorProto.Type.Name(field.type)
    label = pb.FieldDescriptorProto.Label.Name(field.label)
    return (field.number, kind, field.type_name, label, oneof)


def is_map_entry(message):
    return message.options.map_entry


def compare_message(name, ours, theirs, differences):
    if is_map_entry(ours) != is_map_entry(theirs):
        differences.append(f"{name}: a map entry on one side only")
    their_fields = {f.name: f for f in theirs.field}
    our_names = {f.name for f in ours.field}
    reserved_numbers = {n for r in ours.reserved_range for n in range(r.start, r.end)}
    reserved_names = set(ours.reserved_name)
    for field in ours.field:
        if field.name not in their_fields:
            differences.append(f"{name}.{field.name}: Ray has no such field")
            continue
        mine = field_facts(ours, field)
        ray = field_facts(theirs, their_fields[field.name])
        if mine != ray:
            differences.append(f"{name}.{field.name}: ours {mine}, Ray's {ray}")
    for field in theirs.field:
        if field.name in our_names:
            continue
        if field.number not in reserved_numbers or field.name not in reserved_names:
            differences.append(
                f"{name}.{field.name} = {field.number}: neither declared nor reserved"
            )
    for reserved in reserved_names - set(their_fields):
        differences.append(f"{name}: reserves {reserved}, which Ray does not have")
    for number in reserved_numbers - {f.number for f in theirs.field}:
        differences.append(f"{name}: reserves {number}, which Ray does not use")
    return len(ours.field)


def compare(ours, theirs):
    differences = []
    n_fields = 0
    for name, message in ours.messages.items():
        if name not in theirs.messages:
            differences.append(f"{name}: Ray has no such message")
            continue
        n_fields += compare_message(name, message, theirs.messages[name], differences)
    for name, values in ours.enums.items():
        if values != theirs.enums.get(name):
            differences.append(f"{name}: ours {values}, Ray's {theirs.enums.get(name)}")
    for path, facts in ours.methods.items():
        if facts != theirs.methods.get(path):
            differences.append(f"{path}: ours {facts}, Ray's {theirs.methods.get(path)}")
    return differences, n_fields


def mutations(files):
    """Copies of our files with one thing wrong each: the comparison must see every one."""

    def change(alter):
        copies = [pb.FileDescriptorProto.FromString(f.SerializeToString()) for f in files]
        message = next(m for f in copies for m in f.message_type if m.name == "GcsNodeInfo")
        service = next(s for f in copies for s in f.service if s.name == "NodeInfoGcsService")
        alter(message, service)
        return copies

    def set_number(message, _):
        message.field[0].number = 99

    def set_type(message, _):
        message.field[0].type = pb.FieldDescriptorProto.TYPE_STRING

    def set_label(message, _):
        message.field[0].label = pb.FieldDescriptorProto.LABEL_REPEATED

    def drop_field(message, _):
        del message.field[3]

    def set_enum(message, _):
        message.enum_type[0].value[1].number = 5

    def set_output(_, service):
        service.method[0].output_type = ".ray.rpc.CheckAliveReply"

    def set_oneof(message, _):
        message.oneof_decl.add(name="_node_name")
        next(f for f in message.field if f.name == "node_name").oneof_index = 0

    alterations = [set_number, set_type, set_label, drop_field, set_enum, set_output, set_oneof]
    return [(alter.__name__, change(alter)) for alter in alterations]


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    import ray

    assert ray.__version__ == RAY_VERSION, f"ray {ray.__version__}, expected {RAY_VERSION}"
    with tempfile.TemporaryDirectory() as work:
        files = our_files(root, pathlib.Path(work))
    theirs = Index(wheel_files())
    ours = Index(files)
    differences, n_fields = compare(ours, theirs)
    for difference in differences:
        print(difference)
    for name, altered in mutations(files):
        if not compare(Index(altered), theirs)[0]:
            differences.append(name)
            print(f"the comparison does not notice {name}")
    print(
        f"compared with ray {ray.__version__}: {len(ours.messages)} messages, {n_fields} fields, "
        f"{len(ours.enums)} enums, {len(ours.methods)} methods; {len(differences)} differences"
    )
    assert n_fields > 0 and ours.methods, "nothing was compared"
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())

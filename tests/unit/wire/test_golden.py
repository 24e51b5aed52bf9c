"""The golden files: version 1 of the wire, byte for byte, for this and every other implementation."""

import re
from importlib import resources

import msgspec

from kvferry.wire import AnyMessage, decode, encode

GOLDEN = resources.files("kvferry.wire") / "golden"


def golden(name):
    return (GOLDEN / f"{name}.bin").read_bytes()


def test_a_golden_file_decodes_to_its_record(name, frame):
    assert decode(golden(name)) == frame


def test_a_record_encodes_to_its_golden_file(name, frame):
    assert encode(frame) == golden(name)


def test_each_golden_file_has_a_record_and_a_line_in_the_readme(frames):
    files = {file.name.removesuffix(".bin") for file in GOLDEN.iterdir() if file.name.endswith(".bin")}
    assert files == set(frames)
    listed = re.findall(r"^\| `(\w+)\.bin` \|", (GOLDEN / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(frames)


def test_each_kind_of_message_has_a_golden_file(frames):
    kinds = {type(frame.message) for frame in frames.values()}
    assert kinds == set(AnyMessage.__args__)


def test_each_optional_field_of_each_message_is_set_in_some_golden_file(frames):
    for kind in AnyMessage.__args__:
        messages = [frame.message for frame in frames.values() if type(frame.message) is kind]
        for field in msgspec.structs.fields(kind):
            if field.required:
                continue
            default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
            assert any(getattr(message, field.name) != default for message in messages), (kind, field.name)

"""The picture of `kvferry explain`: its rectangles tile each decode rank's part, and its SVG says who fills what."""

import builtins
import xml.etree.ElementTree as ET
from collections import Counter

import numpy as np
import pytest

from kvferry.cli import picture
from kvferry.cli.explain import prepare
from kvferry.cli.explained import Ask, explain
from kvferry.cli.main import main
from kvferry.cli.panels import groups
from kvferry.layout import Slot
from kvferry.presets import Block, Item, ModelShape, parse_grid

SVG = "{http://www.w3.org/2000/svg}"


def answer(model, prefill, decode, tokens=4096, prefix=0):
    asked = prepare(model, None, prefill, decode, tokens, prefix, 0)
    return explain(asked), asked


def drawn(*args, **rest):
    return groups(answer(*args, **rest)[0])


def areas(panel):
    return sum(box.width * box.height for box in panel.boxes)


# the rectangles


def test_each_prefill_rank_fills_the_column_of_its_head():
    (group,) = drawn("llama-3.1-70b", "tp=8", "tp=2")
    assert (group.space, group.fields, group.axis, group.begin, group.end) == ("kv", ["k", "v"], "heads", 0, 8)
    assert group.layers == list(range(80))
    assert [panel.decode.tp for panel in group.panels] == [0, 1]
    boxes = [(box.prefill.tp, box.left, box.width, box.top, box.height) for box in group.panels[1].boxes]
    assert boxes == [(tp, tp, 1, 0, 80) for tp in (4, 5, 6, 7)]


def test_stages_fill_their_layers():
    (group,) = drawn("llama-3.1-70b", "pp=2,stages=30/50", "tp=1")
    (panel,) = group.panels
    assert [(box.prefill.pp, box.top, box.height, box.left, box.width) for box in panel.boxes] == [
        (0, 0, 30, 0, 8),
        (1, 30, 50, 0, 8),
    ]


def test_layers_of_a_space_are_drawn_without_those_of_another():
    kv, swa = drawn("gpt-oss-20b", "tp=2", "tp=2")
    assert (kv.layers, swa.layers) == (list(range(1, 24, 2)), list(range(0, 24, 2)))
    assert {(box.top, box.height) for group in (kv, swa) for panel in group.panels for box in panel.boxes} == {(0, 12)}
    assert (kv.tokens, swa.tokens) == ((0, 4096), (3968, 4096))


def test_fields_with_other_heads_are_a_group_of_their_own():
    names = [(group.space, group.fields, group.end) for group in drawn("qwen3-next-80b-a3b", "tp=8", "tp=4")]
    assert names == [("kv", ["k", "v"], 2), ("mamba", ["conv_k", "conv_q"], 16), ("mamba", ["conv_v", "temporal"], 32)]


def test_without_heads_tokens_are_the_axis_and_what_decode_has_is_not_on_it():
    (group,) = drawn("deepseek-r1", "cp=4", "", prefix=1024)
    assert (group.axis, group.begin, group.end) == ("tokens", 1024, 4096)
    boxes = [(box.prefill.cp, box.left, box.width) for box in group.panels[0].boxes]
    assert np.allclose(boxes, [(1, 1024, 1024), (2, 2048, 1024), (3, 3072, 1024)])


def test_tokens_that_are_dealt_out_share_each_head_s_column():
    (group,) = drawn("llama-3.1-8b", "cp=2,deal=zigzag", "tp=4")
    boxes = group.panels[1].boxes
    assert Counter(box.prefill.cp for box in boxes) == {0: 4, 1: 2}, (
        "two heads; rank 0 holds the first and last quarter"
    )
    assert sorted((box.left, box.width) for box in boxes) == [
        (2, 0.25), (2.25, 0.5), (2.75, 0.25), (3, 0.25), (3.25, 0.5), (3.75, 0.25)
    ]  # fmt: skip
    assert not any(box.is_share for box in boxes)


def test_interleaved_tokens_are_drawn_as_shares_side_by_side():
    (group,) = drawn("deepseek-r1", "cp=4,deal=zigzag", "dcp=4,page=64")
    for panel in group.panels:
        assert all(box.is_share for box in panel.boxes)
        assert np.allclose([box.left for box in panel.boxes], [0, 1024, 2048, 3072], atol=4)
        assert np.isclose(areas(panel), 4093 * 61), "from the first of its tokens to the last one"


def test_a_state_without_heads_fills_its_panel(tmp_path):
    model = ModelShape("m", (Block("state", (0, 2), (Item("s", 4),), Slot(), "request"),))
    asked = Ask(model, model, parse_grid("tp=2"), parse_grid(""), 10)
    found = explain(asked)
    (group,) = groups(found)
    assert (group.axis, group.begin, group.end, group.layers) == ("", 0, 1, [0, 2])
    assert [(box.left, box.width, box.top, box.height) for box in group.panels[0].boxes] == [(0, 1, 0, 2)]
    picture.write(found, asked, tmp_path / "x.svg")
    assert not {"head", "token"} & set(texts(ET.parse(tmp_path / "x.svg").getroot()))


@pytest.mark.parametrize(
    ("model", "prefill", "decode"),
    [
        ("llama-3.1-70b", "tp=8", "tp=1"),
        ("llama-3.1-70b", "", "tp=8"),
        ("llama-3.1-70b", "pp=4,tp=3", "tp=5,pp=2"),
        ("qwen3-235b-a22b", "tp=8", "tp=12"),
        ("gemma-3-27b", "tp=4", "pp=3"),
        ("deepseek-r1", "cp=4,deal=page", "cp=2"),
        ("llama-3.1-8b", "cp=3,deal=page,page=64", "tp=2"),
        ("llama-3.1-8b", "cp=3,deal=page,page=512", "cp=2,tp=2,deal=zigzag"),
    ],
)
def test_the_boxes_of_a_panel_fill_what_the_rank_holds_once(model, prefill, decode):
    """Of layers x heads x tokens that move, without gap or overlap."""
    found, asked = answer(model, prefill, decode)
    for group in groups(found):
        tokens = group.tokens[1] - group.tokens[0]
        for panel in group.panels:
            lines = [line for line in found.lines if (line.decode, line.space) == (panel.decode, group.space)]
            cells = 0
            for line in lines:
                part = next(part for part in line.parts if group.fields[0] in part.fields)
                layers = sum(last - first + 1 for first, last in part.layers)
                heads = sum(last - first + 1 for first, last in part.heads)
                cells += layers * (heads / tokens if heads else 1) * line.tokens.count
            assert np.isclose(areas(panel), cells)
            assert not any(overlap(a, b) for i, a in enumerate(panel.boxes) for b in panel.boxes[:i])
            assert all(group.begin <= box.left for box in panel.boxes)
            assert all(box.left + box.width <= group.end + 1e-9 for box in panel.boxes)
    assert asked.tokens == 4096


def overlap(a, b):
    across = min(a.left + a.width, b.left + b.width) - max(a.left, b.left) > 1e-9
    return across and min(a.top + a.height, b.top + b.height) > max(a.top, b.top)


# the SVG


def svg(tmp_path, *words):
    path = tmp_path / "picture.svg"
    assert main(["explain", *words, "--svg", str(path)]) == 0
    return ET.parse(path).getroot(), path.read_bytes()


def texts(root):
    return ["".join(element.itertext()).strip() for element in root.iter(f"{SVG}text")]


def fills(root):
    """The colours of the filled shapes, in order."""
    styles = [element.get("style", "") for element in root.iter(f"{SVG}path")]
    return [style.split("fill: ")[1][:7] for style in styles if "fill: #" in style]


def test_the_svg_has_a_panel_for_each_decode_rank_and_a_label_and_colour_for_each_prefill_rank(tmp_path):
    root, data = svg(tmp_path, "--model", "llama-3.1-70b", "--prefill", "tp=8", "--decode", "tp=2")
    found = texts(root)
    assert [text for text in found if text.startswith("decode ")] == ["decode tp0", "decode tp1"]
    assert found.count("kv: k, v") == 2
    assert {f"tp{rank}" for rank in range(8)} <= set(found)
    assert sum(text.endswith(": 335,544,320 B") for text in found) == 8
    assert "llama-3.1-70b: 2,684,354,560 bytes in 10,485,760 rows, room 0" in found
    colours = Counter(fills(root))
    assert len([colour for colour, times in colours.items() if times == 2]) >= 8, "in its panel and in the legend"
    assert b"<dc:date>" not in data


def test_the_same_answer_is_the_same_picture(tmp_path):
    words = ("--model", "qwen3-next-80b-a3b", "--prefill", "tp=4", "--decode", "tp=2")
    assert svg(tmp_path, *words)[1] == svg(tmp_path, *words)[1]


def test_the_prefix_windows_and_shares_are_told_in_the_picture(tmp_path):
    root, _ = svg(tmp_path, "--model", "gpt-oss-20b", "--prefill", "tp=2", "--decode", "tp=2", "--prefix", "100")
    found = texts(root)
    assert any(text.startswith("8,192 tokens, of which decode has 100; a panel is") for text in found)
    assert found.count("head, tokens 8,064-8,191") == found.count("head, tokens 100-8,191") == 2
    assert "interleaved: width is the share" not in found
    root, _ = svg(tmp_path, "--model", "deepseek-r1", "--prefill", "cp=2,deal=page", "--decode", "tp=2")
    assert "interleaved: width is the share" in texts(root)


@pytest.mark.parametrize(("decode", "panels", "left_out"), [("tp=12", 24, 0), ("tp=16", 24, 4), ("dp=2,tp=1", 2, 0)])
def test_there_is_a_limit_to_the_panels_and_what_is_left_out_is_said(tmp_path, decode, panels, left_out):
    root, data = svg(tmp_path, "--model", "gpt-oss-120b", "--prefill", "tp=4", "--decode", decode, "--tokens", "64")
    found = texts(root)
    assert sum(text.startswith("decode ") for text in found) == panels <= picture.MAX_PANELS
    note = f"{left_out} more decode ranks are not drawn: a picture has at most 24 panels"
    assert (note in found) == bool(left_out)
    assert len(data) < 250_000


def test_narrow_columns_are_labelled_upright_and_slivers_by_the_legend(tmp_path):
    root, _ = svg(tmp_path, "--model", "deepseek-r1", "--prefill", "cp=32", "--decode", "", "--tokens", "8192")
    found = texts(root)
    assert not {f"cp{rank}" for rank in range(32)} & set(found)
    assert sum(text.startswith("cp") and text.endswith(" B") for text in found) == 32


def test_more_prefill_ranks_than_colours_go_on_from_the_first():
    colours = [picture._colour(number) for number in range(40)]
    assert len(set(colours)) == 20
    assert colours[:20] == colours[20:]


def test_where_nothing_moves_the_picture_says_so(tmp_path):
    root, _ = svg(tmp_path, "--model", "deepseek-r1", "--tokens", "64", "--prefix", "64")
    assert "deepseek-r1: 0 bytes in 0 rows, room 0" in texts(root)


def test_without_matplotlib_the_install_line_is_said_before_anything_is_done(monkeypatch, capsys, tmp_path):
    plain = builtins.__import__

    def without(name, *rest):
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return plain(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    path = tmp_path / "x.svg"
    assert main(["explain", "--model", "deepseek-r1", "--svg", str(path)]) == 2
    assert capsys.readouterr().err == (
        "kvferry: error: --svg needs matplotlib, which is not installed (pip install 'kvferry[plots]')\n"
    )
    assert main(["explain", "--model", "deepseek-r1"]) == 0, "only the picture needs it"
    assert not path.exists()


def test_a_file_that_can_not_be_written_is_bad_input(capsys, tmp_path):
    assert main(["explain", "--model", "deepseek-r1", "--svg", str(tmp_path / "none" / "x.svg")]) == 2
    assert "x.svg: No such file or directory" in capsys.readouterr().err


def test_sides_that_do_not_fit_have_no_picture(tmp_path):
    path = tmp_path / "x.svg"
    words = ["--model", "deepseek-r1", "--decode-model", "deepseek-v3", "--svg", str(path)]
    assert main(["explain", *words]) == 1
    assert not path.exists()

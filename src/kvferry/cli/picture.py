"""The picture of `kvferry explain`: a panel per decode rank, a colour per prefill rank.

matplotlib is an optional extra, and imported here only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.cli.explain import rank_name
from kvferry.cli.explained import Ask, Explained
from kvferry.cli.panels import Box, Group, Panel, groups
from kvferry.errors import ConfigError
from kvferry.ids import Rank

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_PANELS = 24
"""In one picture; what is left out is said in it."""
MAX_COLUMNS = 6
_PANEL_INCHES = (2.1, 2.3)
_LEAST_INCHES = 6.5
_HEADER_INCHES, _LEGEND_ENTRY_INCHES, _LEGEND_LINE_INCHES, _MARGIN_INCHES = 0.75, 2.15, 0.2, 0.4
_NARROW, _SLIVER = 0.3, 0.05
"""Below these parts of a panel's width a label is turned, or left to the legend."""
_STYLE: Any = {"svg.hashsalt": "kvferry", "svg.fonttype": "none", "font.size": 8, "hatch.linewidth": 0.4}


def check() -> None:
    """Raise ConfigError with the install line if matplotlib is missing."""
    try:
        import matplotlib as _  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--svg needs matplotlib, which is not installed", hint="pip install 'kvferry[plots]'"
        ) from None


def write(found: Explained, ask: Ask, path: Path) -> None:
    """Write the picture; the same answer gives the same bytes.

    Raises:
        ConfigError: matplotlib is missing, or the file can't be written.
    """
    check()
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):
        figure = draw(found, ask)
        try:
            figure.savefig(path, format="svg", metadata={"Date": None, "Creator": "kvferry explain"})
        except OSError as error:
            raise ConfigError(f"--svg {path}: {error.strerror or error}") from None


def draw(found: Explained, ask: Ask) -> Figure:
    """The figure, for savefig."""
    from matplotlib.figure import Figure

    shown = groups(found)
    most = max(MAX_PANELS // max(len(shown), 1), 1)
    senders = [total for total in found.sources if total.bytes]
    colours = {total.rank: _colour(number) for number, total in enumerate(senders)}
    rows = [(group, row) for group in shown for row in _rows(group.panels[:most])]
    columns = max((len(row) for _, row in rows), default=1)
    width = max(columns * _PANEL_INCHES[0], _LEAST_INCHES)
    legend_columns = int(width / _LEGEND_ENTRY_INCHES)
    below = math.ceil((len(senders) + 2) / legend_columns) * _LEGEND_LINE_INCHES + _MARGIN_INCHES
    height = _HEADER_INCHES + len(rows) * _PANEL_INCHES[1] + below
    figure = Figure(figsize=(width, height))
    grid = figure.add_gridspec(
        max(len(rows), 1), columns, left=0.55 / width, right=1 - 0.15 / width, bottom=below / height + 0.35 / height,
        top=1 - _HEADER_INCHES / height - 0.3 / height, wspace=0.35, hspace=0.75,
    )  # fmt: skip
    for number, (group, row) in enumerate(rows):
        for column, panel in enumerate(row):
            axes = figure.add_subplot(grid[number, column])
            _draw_panel(axes, group, panel, ask, colours)
            if not column:
                axes.set_ylabel("layer", labelpad=1)
    _draw_texts(figure, found, ask, max((len(group.panels) for group in shown), default=0) - most)
    _draw_legend(figure, found, ask, colours, legend_columns)
    return figure


def _rows(panels: Sequence[Panel]) -> list[Sequence[Panel]]:
    return [panels[begin : begin + MAX_COLUMNS] for begin in range(0, len(panels), MAX_COLUMNS)]


def _colour(number: int) -> Any:
    """One of twenty, the strong ones first."""
    import matplotlib as mpl

    return mpl.colormaps["tab20"]((2 * number + number // 10 % 2) % 20)


def _draw_panel(axes: Axes, group: Group, panel: Panel, ask: Ask, colours: dict[Rank, Any]) -> None:
    span = group.end - group.begin
    axes.set_facecolor("#eeeeee")
    axes.set_xlim(group.begin, group.end)
    axes.set_ylim(len(group.layers), 0)
    labelled: set[Rank] = set()
    for box in panel.boxes:
        _draw_box(axes, box, colours[box.prefill])
        if box.prefill not in labelled and box.width / span >= _SLIVER:
            turned = 90 if box.width / span < _NARROW else 0
            place = box.left + box.width / 2, box.top + box.height / 2
            axes.text(
                *place, rank_name(box.prefill, ask.prefill), ha="center", va="center", rotation=turned, clip_on=True
            )
            labelled.add(box.prefill)
    axes.set_title(
        f"decode {rank_name(panel.decode, ask.decode)}\n{group.space}: {', '.join(group.fields)}", fontsize=8
    )
    ticks = sorted({0, len(group.layers) // 2, len(group.layers) - 1})
    axes.set_yticks([tick + 0.5 for tick in ticks], [str(group.layers[tick]) for tick in ticks])
    _label_across(axes, group, ask)


def _draw_box(axes: Axes, box: Box, colour: Any) -> None:
    from matplotlib.patches import Rectangle

    hatch = "////" if box.is_share else None
    style: dict[str, Any] = {"facecolor": colour, "edgecolor": "white", "linewidth": 0.5, "hatch": hatch}
    axes.add_patch(Rectangle((box.left, box.top), box.width, box.height, **style))


def _label_across(axes: Axes, group: Group, ask: Ask) -> None:
    if not group.axis:
        axes.set_xticks([])
        return
    if group.axis == "heads":
        ids = sorted({group.begin, (group.begin + group.end - 1) // 2, group.end - 1})
        axes.set_xticks([head + 0.5 for head in ids], [str(head) for head in ids])
    else:
        axes.set_xticks([group.begin, group.end], [f"{group.begin:,}", f"{group.end:,}"])
        left, right = axes.get_xticklabels()
        left.set_horizontalalignment("left")
        right.set_horizontalalignment("right")
    begin, end = group.tokens
    part = "" if group.axis == "tokens" or end - begin in {0, ask.tokens} else f", tokens {begin:,}-{end - 1:,}"
    axes.set_xlabel(f"{group.axis.removesuffix('s')}{part}", labelpad=1)


def _draw_texts(figure: Figure, found: Explained, ask: Ask, left_out: int) -> None:
    inches = figure.get_figheight()
    title = f"{ask.decode_model.name}: {found.bytes:,} bytes in {found.rows:,} rows, room {ask.room}"
    kept = f", of which decode has {ask.prefix:,}" if ask.prefix else ""
    subtitle = f"{ask.tokens:,} tokens{kept}; a panel is a decode rank, a colour the prefill rank that fills it"
    figure.text(0.5, 1 - 0.25 / inches, title, ha="center", va="center", fontsize=10)
    figure.text(0.5, 1 - 0.47 / inches, subtitle, ha="center", va="center", color="#555555")
    if left_out > 0:
        note = f"{left_out} more decode ranks are not drawn: a picture has at most {MAX_PANELS} panels"
        figure.text(0.5, 1 - 0.66 / inches, note, ha="center", va="center", color="#aa0000")


def _draw_legend(figure: Figure, found: Explained, ask: Ask, colours: dict[Rank, Any], columns: int) -> None:
    from matplotlib.patches import Patch

    entries = [
        Patch(facecolor=colours[total.rank], label=f"{rank_name(total.rank, ask.prefill)}: {total.bytes:,} B")
        for total in found.sources
        if total.rank in colours
    ]
    entries += [Patch(facecolor="#eeeeee", edgecolor="#bbbbbb", label="not sent to it")]
    if any(box.is_share for group in groups(found) for panel in group.panels for box in panel.boxes):
        entries.append(
            Patch(facecolor="white", edgecolor="black", hatch="////", label="interleaved: width is the share")
        )
    figure.legend(handles=entries, loc="lower center", ncol=columns, frameon=False, title="prefill ranks, bytes sent")

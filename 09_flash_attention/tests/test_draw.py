"""draw.py: its pictures show what the code does, and are written whole; pictures in chapters."""

import contextlib
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

import draw
import torch
from flash_attention import attend_in_tiles, online_softmax_step
from lab import lesson
from lab.cases import Case
from lab.formulas import forward_bytes
from lab.sheet import size_text
from lab.traffic import total, traffic
from lab.visible import Visible
from matplotlib.figure import Figure
from PIL import Image, ImageChops, ImageStat

PHASE = Path(draw.__file__).parent
FIGURES = PHASE / "figures"
TEXTS = {path: path.read_text(encoding="utf-8") for path in [
    *PHASE.parent.glob("README*.md"), *PHASE.glob("README*.md"), *PHASE.glob("lesson/*/*.md")]}
MOST_BYTES = {".png": 120_000, ".gif": 200_000}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """The folder with all pictures, as the command draws them."""
    folder = tmp_path_factory.mktemp("pictures")
    for picture in draw.PICTURES.values():
        picture(folder)
    return folder


def test_each_picture_is_drawn_and_small(drawn):
    files = {path.name for path in drawn.iterdir()}
    assert files == {*(f"{name}.png" for name in draw.PICTURES), "walk.gif"}
    for path in drawn.iterdir():
        assert 5000 < path.stat().st_size < MOST_BYTES[path.suffix], path.name


def test_the_committed_pictures_are_what_the_command_draws(drawn):
    for path in drawn.iterdir():
        with Image.open(path) as here, Image.open(FIGURES / path.name) as there:
            assert here.size == there.size, path.name
            off = ImageStat.Stat(ImageChops.difference(here.convert("L"), there.convert("L"))).mean
            assert off[0] < 3, f"figures/{path.name} is an older one"  # fonts differ a little


def test_the_animation_shows_each_tile_of_both_walks(drawn):
    with Image.open(drawn / "walk.gif") as animation:
        assert animation.n_frames == 16 + 10 + 1
        assert animation.size[0] == 700


@pytest.mark.parametrize("name", draw.PICTURES)
def test_a_picture_that_fails_leaves_nothing(name, tmp_path, monkeypatch):
    def half(figure, path, **_):
        if isinstance(path, Path):
            path.write_bytes(b"half")
        raise OSError("the disk is full")

    monkeypatch.setattr(Figure, "savefig", half)
    with pytest.raises(OSError, match="the disk is full"):
        draw.PICTURES[name](tmp_path)
    assert not [*tmp_path.iterdir()]


def test_an_animation_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    whole = Image.Image.save

    def half(image, file, *more, **options):
        if options.get("save_all"):
            file.write_bytes(b"half")
            raise OSError("the disk is full")
        whole(image, file, *more, **options)

    (tmp_path / "walk.gif").write_bytes(b"old")
    monkeypatch.setattr(draw, "visited", lambda causal: [(0, 0), (1, 0), (2, 1), (3, 0)])  # faster
    monkeypatch.setattr(Image.Image, "save", half)
    with pytest.raises(OSError, match="the disk is full"):
        draw.draw_walk(tmp_path)
    assert (tmp_path / "walk.gif").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["walk.gif", "walk.png"]


# What they show


@pytest.mark.parametrize("causal", [False, True])
def test_the_walk_visits_what_the_loop_visits(causal):
    class Recorder(Visible):
        def row_block(self, x, rows):
            self.row = rows.start // draw.ROWS
            return super().row_block(x, rows)

        def score_blocks(self, Q, K, V, rows, Bc, scratch):
            for cols, *blocks in super().score_blocks(Q, K, V, rows, Bc, scratch):
                seen.append((self.row, cols.start // draw.ROWS))
                yield (cols, *blocks)

    seen, x = [], torch.randn(1, draw.BLOCKS * draw.ROWS, 3)
    attend_in_tiles(Recorder(x, x, x, causal), draw.ROWS, draw.ROWS, (x, torch.empty_like(x)),
                    (x, x), online_softmax_step)
    assert draw.visited(causal) == seen and len(seen) == (10 if causal else 16)


@pytest.mark.parametrize("name", ["FA1", "FA2"])
def test_the_orders_read_and_write_what_the_io_model_says(name):
    signs, d = Counter(), 4
    for event in draw.order_of(name):
        for array, _, sign in draw.marks(event):
            signs.update((array, letter) for letter in sign)
    passes = traffic(name, draw.BLOCKS * draw.ROWS, d, draw.ROWS, draw.ROWS)
    for array in "QKO":
        for letter, way in (("R", "read"), ("W", "written")):
            expected = sum(getattr(p, way) for p in passes if p.array == array)
            assert signs[array, letter] * draw.ROWS * d == expected, (array, way)


def axes_of(name, monkeypatch):
    """The axes of a picture as they are when it is written."""
    found = []

    @contextlib.contextmanager
    def kept(path, *shape, figsize=None, **options):
        found.append(Figure(figsize=figsize).subplots(*shape, **options))
        yield found[0]

    monkeypatch.setattr(draw, "plotted", kept)
    draw.PICTURES[name](Path())
    return found[0]


def test_the_bars_are_the_io_models(monkeypatch):
    axes, widths = axes_of("moved", monkeypatch), Counter()
    for bar in axes.patches:
        widths[round(bar.get_y() + bar.get_height() / 2)] += bar.get_width()
    for row, name in enumerate(("standard", "FA1", "FA2")):
        moved = 4 * total(traffic(name, draw.MOVED_N, draw.D, 32, 32))
        assert sum(draw.moved()[name].values()) == moved
        assert widths[row] == pytest.approx(moved / 1e6)
        assert any(text.get_text() == f"{moved / 1e6:.1f} MB" for text in axes.texts)


def test_what_is_held_is_drawn_to_scale(monkeypatch):
    axes, case = axes_of("held", monkeypatch), Case(draw.N, d=draw.D)
    areas = [bar.get_width() * bar.get_height() * 4 * draw.N**2 for bar in axes.patches]
    drawn = {"standard": sum(areas[:3]), "flash": areas[3] + sum(areas[4:])}
    for name, count in draw.held().items():
        assert count == forward_bytes(name, case, draw.TILE, draw.TILE)
        assert drawn[name] == pytest.approx(count)
        assert any(text.get_text() == f"{name}: {size_text(count)}" for text in axes.texts)


def test_the_bars_of_the_memories_are_as_long_as_they_say(monkeypatch):
    axes = axes_of("memories", monkeypatch)
    ends = {bar.get_width() for bar in axes.patches}
    for one, count in draw.ON_A_910B3.values():
        assert {one, one * count} <= ends
    core = [text.get_text() for text in axes_of("core", monkeypatch).texts]
    for name in ("L0A", "L0B", "L0C", "L1", "L2", "UB"):
        size = size_text(draw.ON_A_910B3[name][0])
        assert any(text.split() == [name, *size.split()] for text in core), name


# The command


def test_one_picture_by_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["draw.py", "--only", "held", "--plot", str(tmp_path)])
    assert draw.main() == 0
    assert str(tmp_path / "held.png") in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["held.png"]


def test_a_wrong_name_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["draw.py", "--only", "nothing"])
    with pytest.raises(SystemExit) as ended:
        draw.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1 and "nothing" in said


def test_a_picture_goes_to_results_where_no_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert lesson.parser(None, "plot").parse_args(["--plot"]).plot == "results"
    assert lesson.parser(None, "plot").parse_args([]).plot is None
    monkeypatch.setattr(sys, "argv", ["draw.py", "--only", "held"])
    assert draw.main() == 0 and (tmp_path / "results" / "held.png").exists()
    assert "results/" in (PHASE.parent / ".gitignore").read_text().split()


# The pictures of the chapters


def test_no_command_of_a_text_draws_over_a_committed_picture():
    for path, text in TEXTS.items():
        assert not re.search(r"^(    |\$ ).*--plot \S*figures", text, re.M), path


@pytest.mark.parametrize("figure", sorted(FIGURES.iterdir()), ids=lambda p: p.name)
def test_a_picture_stands_beside_the_command_that_draws_it(figure):
    commands = []
    for text in TEXTS.values():
        lines = text.splitlines()
        for at, line in enumerate(lines):
            if re.search(rf"figures/{re.escape(figure.name)}\b", line):
                commands += [command for command in lines[max(0, at - 6) : at + 7] if re.match(
                    r" {4}python \S+\.py .*--(plot|html|still)", command)]
    ours = f"draw.py --only {figure.stem} --plot DIR"
    fitting = [line for line in commands if (
        ours in line if figure.stem in draw.PICTURES else "draw.py" not in line)]
    assert fitting, "no text shows it with its command"


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.relative_to(PHASE.parent).as_posix())
def test_a_picture_has_an_alt_text_in_its_language(path):
    for alt, name in re.findall(r"!\[([^]]*)\]\(\S*figures/(\w+)\.\w+\)", TEXTS[path]):
        assert alt.strip(), name
        if name in draw.PICTURES:
            Chinese = path.parent.name == "zh" or path.name.endswith("zh-CN.md")
            assert bool(re.search("[\u4e00-\u9fff]", alt)) == Chinese, name

"""refresh_lesson.py: what a text shows of an output is what its comments say, in every text."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "refresh_lesson.py"
spec = importlib.util.spec_from_file_location("refresh_lesson", SCRIPT)
refresh = importlib.util.module_from_spec(spec)
sys.modules["refresh_lesson"] = refresh
spec.loader.exec_module(refresh)

OUTPUT = """device: cpu

Memory: of one call

| name  |    Q |  peak | why  |
|-------|------|-------|------|
| first | 1x10 | 10.50 |      |
| flash | 1x10 |  0.50 | a, b |
| first | 1x20 | 42.00 |      |
| flash | 1x20 |  1.00 |      |

formula: two lines
of text

Speed

| n |  ms |
|---|-----|
| a | 1.0 |
| b | 2.0 |

the end""".splitlines()


def shown(*parts):
    comments = [f"<!-- show: {part} -->" for part in parts]
    found = refresh.selected(OUTPUT, comments)
    assert refresh.selected(found, comments) == found, "a second time it changes nothing"
    return "\n".join(found)


def test_without_a_comment_all_is_shown():
    assert refresh.selected(OUTPUT, []) == OUTPUT


def test_a_title_takes_its_table_along_and_cuts_are_marked():
    assert shown("Speed") == """device: cpu

...

Speed

| n |  ms |
|---|-----|
| a | 1.0 |
| b | 2.0 |

..."""


def test_rows_and_columns_are_kept_and_cuts_are_marked():
    assert shown("Memory; columns: name | Q | why; rows: flash 1x20 | a, b", "the end") == """\
device: cpu

Memory: of one call

| name  |    Q | ... | why  |
|-------|------|-----|------|
| ...   |      |     |      |
| flash | 1x10 |     | a, b |
| ...   |      |     |      |
| flash | 1x20 |     |      |

...

the end"""


def test_a_narrow_table_has_room_for_the_dots():
    assert shown("Speed; rows: b").splitlines()[6:10] == [
        "| n   |  ms |", "|-----|-----|", "| ... |     |", "| b   | 2.0 |"]


def test_columns_are_as_wide_as_what_is_left():
    table = ["| name |      why |", "|------|----------|", "| a    |   longer |",
             "| b    |      yes |"]
    assert refresh.selected(["T", "", *table], ["<!-- show: T; rows: b -->"])[2:] == [
        "| name | why |", "|------|-----|", "| ...  |     |", "| b    | yes |"]


def test_what_is_said_right_below_a_table_stays():
    table = ["| name | why |", "|------|-----|", "| a    | yes |", "? not to be believed: a: why"]
    assert refresh.selected(table, ["<!-- show: | name; columns: name -->"]) == [
        "| name | ... |", "|------|-----|", "| a    |     |", "? not to be believed: a: why"]


def test_a_word_is_a_whole_word():
    with pytest.raises(refresh.Fault, match="no row has the words '1x2'"):
        shown("Memory; rows: 1x2")


@pytest.mark.parametrize("part, said", [
    ("Nothing", "no part begins with 'Nothing'"), ("Memory; columns: Q | rank", "called 'rank'"),
    ("formula; columns: Q", "begins no table")])
def test_what_the_output_lacks_is_refused(part, said):
    with pytest.raises(refresh.Fault, match=said):
        shown(part)


def block(command, *comments, output=()):
    return "\n".join([*comments, "```text", f"$ {command}", *output, "```"]) + "\n"


@pytest.fixture
def phase(tmp_path, monkeypatch):
    """A repository with one chapter in two languages."""
    for language in ("en", "zh"):
        (tmp_path / "09_flash_attention" / "lesson" / language).mkdir(parents=True)
    monkeypatch.setattr(refresh, "ROOT", tmp_path)
    monkeypatch.setattr(refresh, "PHASE", tmp_path / "09_flash_attention")
    lessons = tmp_path / "09_flash_attention" / "lesson"
    return lessons / "en" / "01_a.md", lessons / "zh" / "01_a.md"


def run(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["refresh_lesson.py", *options])
    refresh.main()


def test_a_command_runs_once_and_each_text_shows_its_part(phase, monkeypatch):
    command = 'echo run >> log && printf "A\\n\\nB\\n\\nC\\n"'
    for path, word in zip(phase, ("before", "之前")):
        path.write_text(f"{word}\n" + block(command, "<!-- show: B -->") + "after\n"
                        + block(command), encoding="utf-8")
    run(monkeypatch)
    for path, word in zip(phase, ("before", "之前")):
        assert path.read_text(encoding="utf-8") == (
            f"{word}\n" + block(command, "<!-- show: B -->", output=["...", "", "B", "", "..."])
            + "after\n" + block(command, output=["A", "", "B", "", "C"]))
    assert (refresh.PHASE / "log").read_text() == "run\n"
    assert refresh.faults(refresh.texts()) == []


def test_a_command_that_fails_or_lacks_a_part_leaves_its_texts(phase, monkeypatch):
    for text in (block("echo A; exit 3"), block("echo A", "<!-- show: B -->", output=["B"])):
        phase[0].write_text(text)
        with pytest.raises(SystemExit) as ended:
            run(monkeypatch)
        assert isinstance(ended.value.code, str) and phase[0].read_text() == text


@pytest.mark.parametrize("text, said", [
    ("```text\nA\n```\n", "an output without a command"),
    ("<!-- show: A -->\n\n" + block("echo A", output=["A"]), "a comment that shows nothing"),
    ("<!-- shows A -->\n" + block("echo A", output=["A"]), "a comment that shows nothing"),
    (block("echo A", "<!-- show: A -->", output=["A", "", "B"]), "its comments say otherwise"),
    (block("echo A", "<!-- show: B -->", output=["A"]), "no part begins with 'B'"),
])
def test_a_text_that_it_would_not_leave_so_is_told_without_a_run(phase, monkeypatch, text, said):
    phase[0].write_text(text)
    monkeypatch.setattr(subprocess, "run", None)
    with pytest.raises(SystemExit, match=said):
        run(monkeypatch, "--check")


def test_two_texts_with_different_outputs_of_one_command_are_told(phase):
    for path, output in zip(phase, ("A", "B")):
        path.write_text(block("echo A", output=[output]))
    assert "has another output" in refresh.faults(refresh.texts())[0]

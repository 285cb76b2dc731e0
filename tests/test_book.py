"""The book: two languages in step, no output without a command, no command that is not taken."""

import argparse
import importlib
import importlib.util
import re
import shlex
import sys
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PHASE = ROOT / "09_flash_attention"
LESSON = PHASE / "lesson"
spec = importlib.util.spec_from_file_location(
    "refresh_lesson", ROOT / "scripts" / "refresh_lesson.py")
refresh = importlib.util.module_from_spec(spec)
sys.modules["refresh_lesson"] = refresh
spec.loader.exec_module(refresh)

TEXTS = refresh.texts()
CHINESE = sorted(path for path in TEXTS if "zh" in path.parts or path.name.endswith(".zh-CN.md"))
CHAPTERS = sorted(path for path in TEXTS if path.parent.parent == LESSON)
MOST_PROSE = 150
SCRIPTS = {"compile.sh": PHASE / "chips" / "compile_kernel.py"}  # what a script hands options to


def name(path):
    return path.relative_to(ROOT).as_posix()


def english(path):
    """The English text of a Chinese one."""
    if path.parent.name == "zh":
        return LESSON / "en" / path.name
    return path.with_name(path.name.replace(".zh-CN", ""))


def taken_apart(path):
    """Return the lines outside of fences, and the fenced blocks as lists of lines."""
    prose, fenced, block = [], [], None
    for line in path.read_text(encoding="utf-8").splitlines():
        if block is None and not line.startswith("```"):
            prose.append(line)
        elif block is None:
            block = [line]
        else:
            block.append(line)
            if line == "```":
                fenced.append(block)
                block = None
    assert block is None, "a block that does not end"
    return prose, fenced


# Two languages


@pytest.mark.parametrize("path", CHINESE, ids=name)
def test_both_languages_show_the_same(path):
    (here, blocks), (there, expected) = taken_apart(path), taken_apart(english(path))
    assert blocks == expected

    def found(pattern, lines):
        return [match for line in lines for match in re.findall(pattern, line)]

    assert found(r"^#+ ", here) == found(r"^#+ ", there), "levels of the headings"
    assert found(r"^<!-- show.*", here) == found(r"^<!-- show.*", there)
    assert found(r"!\[[^]]*\]\(([^)]+)\)", here) == found(r"!\[[^]]*\]\(([^)]+)\)", there)
    commands = r"^    ((?:python|bash) .*?)(?: +#.*)?$"
    assert found(commands, here) == found(commands, there)


@pytest.mark.parametrize("path", CHINESE, ids=name)
def test_the_first_line_leads_to_the_other_language(path):
    other = english(path)
    there = Path("..", "zh", path.name) if path.parent.name == "zh" else Path(path.name)
    back = Path("..", "en", path.name) if path.parent.name == "zh" else Path(other.name)
    assert first_line(path) == f"[English]({back.as_posix()}) | 简体中文"
    assert first_line(other) == f"English | [简体中文]({there.as_posix()})"


def first_line(path):
    return path.read_text(encoding="utf-8").partition("\n")[0]


@pytest.mark.parametrize("path", CHINESE, ids=name)
def test_terms_are_those_of_the_glossary(path):
    here = "\n".join(taken_apart(path)[0])
    words = [line for line in taken_apart(english(path))[0] if not line.startswith("    ")]
    there = re.sub(r"`[^`]*`|\]\([^)]*\)", "", "\n".join(words))  # neither code nor links
    terms = re.findall(r"^\| ([a-zA-Z].*?) +\| (.*?) +\|$", (LESSON / "glossary.md").read_text(
        encoding="utf-8"), re.M)[1:]
    assert len(terms) > 40
    for term, translations in terms:
        if re.search(rf"\b{term}(s|es)?\b", there, re.I):
            assert any(word.lower() in here.lower() for word in translations.split(" / ")), term


# The frame of a chapter


FRAMED = [path for there in CHINESE if there in CHAPTERS for path in (there, english(there))]


@pytest.mark.parametrize("path", FRAMED, ids=name)
def test_a_chapter_has_its_parts(path):
    text, number = path.read_text(encoding="utf-8"), int(path.name[:2])
    Chinese = path in CHINESE
    assert re.search(rf"^# {number}\. ", text, re.M)
    assert re.search(r"^约 \d+ 分钟" if Chinese else r"^About \d+ minutes", text, re.M)
    guess = "**先猜一猜。**" if Chinese else "**Guess first.**"
    assert guess in text and text.index(guess) < text.index("```text\n$ ")
    exercise = re.search(r"^    python (exercises/\S+\.py)$", text, re.M)
    assert "\n## 练习\n" in text if Chinese else "\n## Exercises\n" in text
    assert exercise and exercise[1] == f"exercises/{path.stem}.py", "the check that the reader runs"
    last = text.rstrip().splitlines()[-1]
    titles = {p.name: re.search(r"^# (.*)$", p.read_text(encoding="utf-8"), re.M)[1]
              for p in CHAPTERS if p.parent == path.parent
              and abs(int(p.name[:2]) - number) == 1}
    links = {name: title.strip("← →")
             for title, name in re.findall(r"\[([^]]*)\]\(([^)]*)\)", last)}
    assert titles.items() <= links.items(), "the last line leads on and back"


@pytest.mark.parametrize("path", CHAPTERS, ids=name)
def test_a_chapter_is_short(path):
    prose = [line for line in taken_apart(path)[0] if line.strip()]
    assert len(prose) <= MOST_PROSE, f"{len(prose)} lines of prose"


# What is shown


def test_every_block_is_what_refresh_lesson_would_leave():
    assert refresh.faults(TEXTS) == []


@pytest.mark.parametrize("path", TEXTS, ids=name)
def test_a_block_is_an_output_with_its_command_or_code_of_the_phase(path):
    prose, fenced = taken_apart(path)
    sources = [p.read_text(encoding="utf-8") for p in PHASE.rglob("*.py")]
    for block in fenced:
        assert block[0] in ("```text", "```python"), block[0]
        if block[0] == "```python":
            code = "\n".join(block[1:-1])
            indented = "\n".join(f"    {line}" if line else line for line in block[1:-1])
            assert any(code in source or indented in source for source in sources), code
    pasted = [line for line in prose if re.match(r"\s*(device: |    +\|)", line)]
    assert not pasted, "an output outside of a block"


# Commands


class Parsed(Exception):
    """The options were taken: nothing more has to run."""


def shown_commands():
    """Yield (folder, command) of each block and of each indented line that calls a program."""
    for path, folder in TEXTS.items():
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("$ ") or re.match(r" {4}(python|bash) ", line):
                yield folder, line[4:] if line.startswith(" ") else line[2:]


def calls(command):
    """Yield the words of each call of a line, without what stands before the program."""
    words = shlex.shlex(command, posix=True, punctuation_chars="|;")
    words.whitespace_split = True
    for between, call in groupby(words, lambda word: word in "|;"):
        call = list(call)
        if between:
            continue
        while re.fullmatch(r"[A-Z_]+=\S*", call[0]):
            call = call[1:]
        yield call


@pytest.mark.parametrize("folder, command", sorted(set(shown_commands())),
                         ids=lambda value: value if isinstance(value, str) else value.name)
def test_a_command_is_taken(folder, command, monkeypatch):
    for program, *words in calls(command):
        if program not in ("python", "bash"):
            continue
        script = (folder / words[0]).resolve()
        if words[0].startswith("scripts/") and not script.exists():
            script = ROOT / words[0]
        assert script.is_file(), words[0]
        script = SCRIPTS.get(script.name, script)
        if script.suffix == ".py" and script.parent in (PHASE, PHASE / "chips"):
            assert takes(script, words[1:], monkeypatch), command


def takes(script, options, monkeypatch):
    """Whether the script's argparse takes the options; nothing else of it runs."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self, args=None, namespace=None):
        parse(self, args, namespace)
        raise Parsed

    try:
        module = importlib.import_module(script.stem)
    except ImportError as missing:
        pytest.skip(str(missing))
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", [str(script), *options])
    try:
        module.main()
    except Parsed:
        return True
    except SystemExit:
        return False
    raise AssertionError(f"{script.name} runs without having read its options")


# Links


def anchors(path):
    """The anchors that GitHub gives the headings of a text."""
    found = {}
    for line in taken_apart(path)[0]:
        if re.match("#+ ", line):
            slug = re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower()).replace(" ", "-")
            found[slug] = found.get(slug, -1) + 1
    return {f"{slug}-{n}" if n else slug for slug, last in found.items() for n in range(last + 1)}


@pytest.mark.parametrize("path", [*TEXTS, LESSON / "glossary.md"], ids=name)
def test_links_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", "\n".join(taken_apart(path)[0])):
        if link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        if target.suffix == ".md":
            assert not anchor or anchor in anchors(target), link

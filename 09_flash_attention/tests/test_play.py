"""play.py: the trace is what the code does, and the page shows it, in a real browser."""

import json
import re
import shutil
import sys
from pathlib import Path

import play
import pytest
import torch
from common import cli
from flash_attention import flash_attention_forward, standard_attention
from generations import flash_attention_1
from io_model import counted
from lab.cases import Case
from lab.traffic import on_chip, traffic
from lab.visible import Visible

LESSON = Path(play.__file__)
FIGURES = LESSON.parent / "figures"
PROBLEMS = {  # a case, Br, Bc
    "the finished page": (Case(16, d=4), 4, 4),
    "more keys": (Case(6, Nk=14, d=3), 2, 4),
    "more queries": (Case(13, Nk=9, d=3), 4, 5),
    "an odd tail": (Case(7, d=5), 3, 2),
    "one of each": (Case(1, d=1), 4, 4),
}
every_problem = pytest.mark.parametrize("case, Br, Bc", PROBLEMS.values(), ids=PROBLEMS)
masked = pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])


def inputs(case, seed=0):
    return [x[0] for x in case.inputs("cpu", seed)]


def moved(events):
    return {way: sum(sum(getattr(event, way).values()) for event in events)
            for way in ("read", "written")}


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """A function that runs the command in an empty folder: its exit status, and what it says."""
    monkeypatch.chdir(tmp_path)

    def run_command(*options):
        monkeypatch.setattr(sys, "argv", [str(LESSON), *options])
        with pytest.raises(SystemExit) as ended:
            cli.serve(play.main)
        return ended.value.code, *capsys.readouterr()

    return run_command


# The trace


@every_problem
@masked
def test_the_trace_is_what_the_forward_does(case, Br, Bc, causal):
    Q, K, V = inputs(case)
    expected = flash_attention_forward(Q, K, V, Br, Bc, causal=causal)
    events, O = play.play("FA2", Q, K, V, Br, Bc, causal)
    assert torch.equal(O, expected)
    stored = torch.tensor([row for event in events for row in event.stored.get("O", [])])
    assert torch.equal(stored, expected)
    for order, other in (("standard", standard_attention(Q, K, V, causal=causal)),
                         ("FA1", expected)):
        torch.testing.assert_close(play.play(order, Q, K, V, Br, Bc, causal)[1], other,
                                   rtol=0, atol=1e-6)


@every_problem
def test_keys_outside_is_flash_attention_1(case, Br, Bc):
    Q, K, V = inputs(case)
    _, O = play.play("FA1", Q, K, V, Br, Bc, False)
    torch.testing.assert_close(O, flash_attention_1(Q, K, V, Br, Bc), rtol=0, atol=1e-6)


@every_problem
@masked
def test_skipped_tiles_are_skipped_and_the_orders_are_two(case, Br, Bc, causal):
    Q, K, V = inputs(case)
    visible = Visible(Q, K, V, causal)
    tiles = [((rows.start, rows.stop), cols.start) for rows in visible.query_blocks(Br)
             for cols in visible.key_blocks(rows, Bc)]
    for order, expected in (("FA2", tiles), ("FA1", sorted(tiles, key=lambda tile: tile[1]))):
        events, _ = play.play(order, Q, K, V, Br, Bc, causal)
        assert [(e.rows, e.step["cols"][0]) for e in events if e.step] == expected
    if causal and case.Nq == 16:
        assert len(tiles) == 10


@every_problem
def test_a_step_holds_the_five_lines(case, Br, Bc):
    Q, K, V = inputs(case)
    for event in play.play("FA2", Q, K, V, Br, Bc, False)[0]:
        m_old, S, m, correction, P, l, O = (torch.tensor(event.step[name]) for name in (
            "m_old", "S", "m", "correction", "P", "l", "O"))
        rows, cols = (slice(*pair) for pair in (event.rows, event.step["cols"]))
        torch.testing.assert_close(S, Q[rows] @ K[cols].T / case.d**0.5)
        torch.testing.assert_close(m, torch.maximum(m_old, S.amax(1, keepdim=True)))
        torch.testing.assert_close(P, torch.exp(S - m))
        torch.testing.assert_close(correction, torch.exp(m_old - m))
        if cols.start == 0:
            torch.testing.assert_close(l, P.sum(1, keepdim=True))
            torch.testing.assert_close(O, P @ V[cols])


def test_numbers_are_exact_and_hidden_scores_have_no_number():
    x = torch.randn(50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.tensor(play.numbers(x)), x)
    assert play.numbers(torch.tensor([[-torch.inf]])) == [[None]]


# Bytes


@pytest.mark.parametrize("N, d, Br, Bc", [(16, 4, 4, 4), (7, 5, 3, 2), (12, 8, 4, 6), (1, 1, 1, 1)])
@pytest.mark.parametrize("order", play.ORDERS)
def test_bytes_are_those_of_the_formulas(order, N, d, Br, Bc):
    passes = traffic(order, N, d, Br, Bc)
    events, _ = play.play(order, *inputs(Case(N, d=d)), Br, Bc, False)
    assert moved(events) == {"read": 4 * sum(p.read for p in passes),
                             "written": 4 * sum(p.written for p in passes)}


def test_bytes_are_those_that_the_scratchpad_counts():
    N, d, B = 64, 16, 16  # a row of Q is a line of the scratchpad
    rows = {row.name: row for row in counted(N, d, 4 * (on_chip(B, B, d) + 3 * B * d), tile=(B, B))}
    for order in ("standard", "FA2"):
        events, _ = play.play(order, *inputs(Case(N, d=d)), B, B, False)
        assert moved(events) == {"read": rows[order].read, "written": rows[order].written}


def test_a_mask_costs_standard_attention_and_saves_the_others():
    rows, _ = play.collect(Case(16, d=4), 4, 4, 0)
    dense, causal = ({r.order: r.read + r.written for r in rows if r.causal == masked}
                     for masked in (False, True))
    assert causal["standard"] == dense["standard"] + 2 * 4 * 16 * 16
    assert causal["FA1"] < dense["FA1"] and causal["FA2"] < dense["FA2"]


def test_a_row_fails_where_the_bytes_or_O_are_wrong():
    case, (Q, K, V) = Case(16, d=4), inputs(Case(16, d=4))
    events, O = play.play("FA2", Q, K, V, 4, 4, False)
    assert play.summary("FA2", case, (Q, K, V), 4, 4, events, O).passed
    assert not play.summary("FA2", case, (Q, K, V), 4, 4, events, O + 1e-4).passed
    assert not play.summary("FA2", case, (Q, K, V), 4, 4, events[1:], O).passed


# The command line


@pytest.mark.parametrize("options, word", [
    (("--seq-len", "17"), "16"), (("--head-dim", "9"), "8"), (("--br", "0"), "--br"),
    (("--kv-len", "x"), "--kv-len"), (("--br", "1", "--bc", "1"), "larger tiles"),
    (("--html", "/proc/x.html"), "--html"), (("--still", "still.png"), "browser")])
def test_what_can_not_be_served_is_refused_in_one_line(
        options, word, run, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    status, _, said = run(*options)
    assert status == 2 and word in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_command_says_what_it_found_and_writes_rows(run, tmp_path):
    status, said, _ = run("--seq-len", "8", "--kv-len", "12", "--json", "rows.json", "--html",
                          "page.html", "--causal")
    assert status == 0 and said.count("pass") == 6
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["order"] for row in rows] == [*play.ORDERS] * 2
    _, trace = without_trace((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert trace["mask"] == "causal" and (len(trace["Q"]), len(trace["K"])) == (8, 12)


# The page, as it is written


def written(problem="the finished page", mask="none"):
    case, Br, Bc = PROBLEMS[problem]
    rows, trace = play.collect(case, Br, Bc, 0)
    return rows, trace, play.page({**trace, "mask": mask, "seed": 0})


def without_trace(html):
    start = html.index('id="trace">') + len('id="trace">')
    end = html.index("</script>", start)
    return html[:start] + html[end:], json.loads(html[start:end])


def flat(value):
    if isinstance(value, dict):
        return [x for key in value for x in (key, *flat(value[key]))]
    if isinstance(value, (list, tuple)):
        return [x for part in value for x in flat(part)]
    return [value]


def test_the_finished_page_is_what_the_command_writes():
    page, trace = without_trace((FIGURES / "play.html").read_text(encoding="utf-8"))
    now, trace_now = without_trace(written()[2])
    assert page == now
    for found, expected in zip(flat(trace), flat(trace_now)):
        assert found == (pytest.approx(expected, abs=1e-5) if isinstance(expected, float)
                         else expected)


def test_page_and_still_are_small():
    assert (FIGURES / "play.html").stat().st_size <= 150_000
    still = (FIGURES / "play.png").read_bytes()
    assert still.startswith(b"\x89PNG") and len(still) <= 150_000


def test_the_page_is_one_file():
    html = written()[2]
    assert not re.search(r"@\w+\.\w+@", html)
    for address in re.findall(r"""(?:src|href|url|@import)\s*[=(]\s*["']?([^"')\s>]+)""", html):
        assert address.startswith(("data:", "#")), address
    assert set(re.findall(r"https?://[^\s\"']+", html)) == {"http://www.w3.org/2000/svg"}


def test_both_languages_say_the_same_things():
    en, zh = json.loads((play.PAGE / "texts.json").read_text(encoding="utf-8")).values()
    assert list(en) == list(zh)
    for key in en:
        assert sorted(re.findall(r"{\w+}", en[key])) == sorted(re.findall(r"{\w+}", zh[key])), key


# The page, in a browser


@pytest.mark.skipif(not any(map(shutil.which, play.BROWSERS)), reason="no Chromium here")
def test_a_still_is_drawn(run, tmp_path):
    assert run("--still", "still.png")[0] == 0
    assert (tmp_path / "still.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    path = next(filter(None, map(shutil.which, play.BROWSERS)), None)
    if not path:
        pytest.skip("no Chromium here")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=path, args=[
            "--no-sandbox", "--disable-gpu", "--disable-background-networking"])
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser, tmp_path):
    """A function that opens a page; at the end nothing may have failed or asked the network."""
    said, asked, contexts = [], [], []

    def open_page(html, fragment="language=en", width=1200, **options):
        file = tmp_path / f"page{len(contexts)}.html"
        file.write_text(html, encoding="utf-8")
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, **options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda fault: said.append(str(fault)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{file.as_uri()}#{fragment}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []
    assert len(asked) == len(contexts) and all(url.startswith("file:") for url in asked)


def each_trace(page):
    """Choose every mask and order, one after the other, and go to the end."""
    for mask in ("none", "causal"):
        for order in play.ORDERS:
            page.evaluate("""names => names.forEach(
                name => document.querySelector(`[data-${name}]`).click())""",
                          [f"mask={mask}", f"order={order}"])
            page.keyboard.press("End")
            yield mask, order


def at(page):
    return int(page.input_value("#position")) + 1


def shown(page):
    """All that the reader sees: texts, labels and the cells' paint."""
    return page.evaluate("""() => [document.body.innerText, [...document.querySelectorAll(
        '#picture rect, [aria-label], [aria-pressed]')].map(x => x.outerHTML.split('>')[0])]""")


@pytest.mark.parametrize("problem", PROBLEMS)
def test_O_added_up_again_is_pythons_and_so_are_the_bytes(opened, problem):
    rows, trace, html = written(problem)
    page, expected = opened(html), {("causal" if r.causal else "none", r.order): r for r in rows}
    for mask, order in each_trace(page):
        assert float(page.get_attribute("#check", "data-difference")) < 1e-6
        row = expected[mask, order]
        assert int(page.get_attribute(f"[data-order={order}]", "data-bytes")) == (
            row.read + row.written)
        assert at(page) == len(trace["traces"][mask][order])
        assert f"{row.read + row.written} of {row.read + row.written}" in page.inner_text("#orders")
        if order == "standard":  # of which S is drawn as a whole
            Q, K, V = inputs(PROBLEMS[problem][0])
            seen = Visible(Q, K, V, mask == "causal").kept_pairs()
            assert page.locator("[data-array=S] .skipped").count() == len(Q) * len(K) - seen


def test_a_wrong_trace_is_told(opened):
    _, trace, _ = written()
    trace["traces"]["none"]["FA2"][5]["step"]["P"][0][0] += 0.01
    page = opened(play.page({**trace, "mask": "none", "seed": 0}))
    assert float(page.get_attribute("#check", "data-difference")) > 1e-4


def test_keys_and_buttons_do_the_same(opened):
    html = written()[2]
    keys, buttons = opened(html), opened(html)
    for key, button in [("ArrowRight", "#next")] * 3 + [("ArrowLeft", "#back")]:
        keys.keyboard.press(key)
        buttons.click(button)
        buttons.evaluate("document.activeElement.blur()")
        assert shown(keys) == shown(buttons)
    assert at(keys) == 3
    keys.keyboard.press("ArrowDown")
    buttons.click("#rows button:nth-child(2)")
    assert shown(keys) == shown(buttons)
    keys.keyboard.press("Space")
    buttons.click("#play")
    for page in (keys, buttons):
        assert page.inner_text("#play") == "Pause"
        page.get_by_text("step 4 of 16").wait_for(timeout=5000)
    keys.keyboard.press("Space")
    buttons.click("#play")
    assert keys.inner_text("#play") == buttons.inner_text("#play") == "Play"


def test_it_plays_to_the_end_and_the_speed_counts(opened):
    page = opened(written("an odd tail")[2], "language=en&order=FA2&step=8")
    page.select_option("#speed", "4")
    page.click("#play")
    page.get_by_role("button", name="Play").wait_for(timeout=5000)
    assert at(page) == 12 and page.get_attribute("#next", "aria-disabled") == "true"
    page.click("#play")
    assert at(page) == 1  # from the start again


def test_a_key_that_a_control_needs_is_left_to_it(opened):
    page = opened(written()[2])
    page.focus("#speed")
    page.keyboard.press("ArrowDown")
    assert at(page) == 1 and page.input_value("#speed") == "2"
    page.focus("#position")
    page.keyboard.press("ArrowRight")
    assert at(page) == 2
    page.focus("#next")
    page.keyboard.press("Space")  # presses the button, once
    assert at(page) == 3 and page.inner_text("#play") == "Play"
    page.focus("#rows button:nth-child(3)")
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowRight")
    assert at(page) == 4 and page.evaluate("document.activeElement.textContent") == "2"


@pytest.mark.parametrize("fragment", ["order=x&mask=y&step=z&language=xx", "step=99", "step=-3"])
def test_an_address_that_makes_no_sense_opens_the_page_all_the_same(opened, fragment):
    assert at(opened(written()[2], fragment)) in (1, 16)


CODE = {"FlashAttention", "Query", "Key", "softmax", "correction", "exp", "max", "sum", "old",
        "block", "for", "step", "Nq", "Nk", "Python", "Tab", "Home", "End", "float"}


# Every text and label of every step of every order, and what a cell says when pointed at.
ALL_TEXTS = """() => {
    const all = selector => [...document.querySelectorAll(selector)], seen = new Set();
    const next = document.getElementById('next');
    const look = () => {
        const labels = all('main [aria-label]').map(x => x.getAttribute('aria-label'));
        for (const part of [...labels, ...all('main *, h1').flatMap(x => [...x.childNodes])
            .filter(x => x.nodeType === Node.TEXT_NODE).map(x => x.data)]) seen.add(part);
    };
    for (const mask of all('[data-mask]')) for (const order of all('[data-order]')) {
        mask.click(), order.click(), look();
        while (next.getAttribute('aria-disabled') === 'false') next.click(), look();
        for (const cell of all('[data-array] > [data-i="0"]')) {
            cell.dispatchEvent(new PointerEvent('pointerover', {bubbles: true}));
            look();
        }
    }
    document.getElementById('play').click(), look();
    return [document.title, ...seen].join(' ');
}"""


@pytest.mark.parametrize("problem", ["more keys", "more queries"])
def test_both_languages_are_whole(opened, problem):
    html = written(problem)[2]
    for language, lang in (("en", "en"), ("zh", "zh-CN")):
        page = opened(html, f"language={language}")
        text = page.evaluate(ALL_TEXTS)
        assert page.get_attribute("html", "lang") == lang
        text = re.sub(r"python \w+\.py(\s+--[\w-]+\s+\d+)*", "", text)
        words = set(re.findall(r"[A-Za-z]{2,}", text)) - CODE
        chinese = re.findall(r"[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]", text)
        assert (language == "en" and words and not chinese
                or language == "zh" and chinese and not words), (words, chinese[:20])


def test_the_switch_changes_the_language_and_keeps_the_place(opened):
    page = opened(written()[2], "language=en&order=FA1&mask=causal&step=4")
    assert "of 11" in page.inner_text("#count") and at(page) == 4
    page.click("#language")
    assert page.inner_text("#play") == "播放" and at(page) == 4
    page.click("#language")
    assert page.inner_text("#play") == "Play"


def test_a_readers_own_language_comes_first(opened):
    page = opened(written()[2], "", locale="zh-CN")
    assert page.get_attribute("html", "lang") == "zh-CN"


@pytest.mark.parametrize("language", ["en", "zh"])
def test_no_window_is_too_narrow(opened, language):
    page = opened(written()[2], f"language={language}")
    page.click("summary")
    for width in (360, 320):
        page.set_viewport_size({"width": width, "height": 800})
        for _ in each_trace(page):
            assert page.evaluate("document.documentElement.scrollWidth") <= width


def luminance(colour):
    channels = [int(c) / 255 for c in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(share * c for share, c in zip((0.2126, 0.7152, 0.0722), linear))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_follows_the_colour_scheme_and_can_be_read(opened, scheme):
    page = opened(written()[2], color_scheme=scheme)

    def colour(selector, name):
        return luminance(page.evaluate(
            "([at, name]) => getComputedStyle(document.querySelector(at))[name]", [selector, name]))

    ground = colour("body", "backgroundColor")
    assert (ground < 0.1) == (scheme == "dark")
    for selector, name in (("body", "color"), (".note", "color"), ("#count", "color"),
                           ("#orders span", "color"), ("svg text", "fill"), ("#play", "color")):
        light, dark = sorted((colour(selector, name), ground), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, selector


def test_who_wants_no_motion_sees_none(opened):
    for motion, moves in (("reduce", False), ("no-preference", True)):
        page = opened(written()[2], reduced_motion=motion)
        transition = page.evaluate(
            "getComputedStyle(document.querySelector('[data-array=Q] rect')).transitionDuration")
        assert (transition != "0s") == moves


def test_everything_has_a_role_and_a_name(opened):
    page = opened(written()[2], "language=en&step=2")
    for role, name in (("button", "Step back"), ("button", "Play"), ("button", "Step forward"),
                       ("slider", "Position"), ("combobox", "Speed"), ("group", "Mask"),
                       ("group", "Order of the loops"), ("region", "Picture"),
                       ("button", "query 3"), ("button", "显示中文")):
        assert page.get_by_role(role, name=name, exact=True).count() == 1, (role, name)
    for order in ("standard attention", "FlashAttention-1", "FlashAttention-2"):
        assert page.get_by_role("button", name=re.compile(f"^{order} .* bytes moved")).count() == 1
    pressed = page.locator("#orders [aria-pressed=true]")
    assert pressed.count() == 1 and "FlashAttention-2" in pressed.inner_text()
    status = page.get_by_role("status")
    assert status.get_attribute("aria-live") == "polite"
    assert "queries 0–3, keys 4–7" in status.inner_text()
    assert page.locator("#picture").get_attribute("aria-label").endswith(status.inner_text())
    names = page.evaluate("""[...document.querySelectorAll('[data-array]')].map(x =>
        [x.dataset.array, x.getAttribute('role'), x.getAttribute('aria-label')])""")
    assert [name for name, _, _ in names] == ["Q", "K", "S", "m", "correction", "l", "O", "V"]
    assert all(role == "img" and label.startswith(f"{name}, rows") for name, role, label in names)
    page.click("#play")
    assert status.get_attribute("aria-live") == "off"  # or it would be read out without an end


def test_pointing_and_focus_show_the_numbers(opened):
    page, (Q, _, _) = opened(written()[2], "language=en&step=2"), inputs(Case(16, d=4))
    page.hover("[data-array=Q] [data-i='1'][data-j='2']", force=True)
    assert page.inner_text("#numbers") == f"Q, row 1, column 2: {Q[1, 2]:.3f}".replace("-", "−")
    page.hover("[data-array=S] [data-i='1'][data-j='5']", force=True)
    assert re.fullmatch(r"query 1, key 5: S = −?\d\.\d{3}, P = \d\.\d{3}",
                        page.inner_text("#numbers"))
    page.focus("[data-array=Q]")
    first = page.inner_text("#numbers")
    assert first.count("|") == 3 and f"{Q[0, 0]:.3f}".replace("-", "−") in first
    page.keyboard.press("End")
    assert page.inner_text("#numbers") != first  # what is focused is followed


def test_the_table_holds_the_whole_trace(opened):
    _, trace, html = written()
    page = opened(html, "language=en&step=3")
    page.click("summary")
    for mask, order in each_trace(page):
        events = trace["traces"][mask][order]
        rows = page.evaluate("""[...document.querySelectorAll('#table tbody tr')].map(
            row => [...row.cells].map(cell => cell.textContent))""")
        assert len(rows) == sum(end - first for first, end in (e["rows"] for e in events))
        by_bytes = [sum(int(row[column] or 0) for row in rows) for column in (-2, -1)]
        assert by_bytes == [sum(sum(e[way].values()) for e in events)
                            for way in ("read", "written")]
        if order == "FA2":
            at_first = [row for row in rows if row[0] == "2"]
            step = events[1]["step"]
            assert [row[5] for row in at_first] == [
                f"{m[0]:.3f}".replace("-", "−") for m in step["m"]]
        assert page.locator("#table [aria-current=step]").count() == (
            events[-1]["rows"][1] - events[-1]["rows"][0])

"""overlap.py: the simulated schedules are possible ones, and near the published times."""

import json
import sys
from collections import defaultdict

import overlap
import pytest
from lab.machines import PUBLISHED_910B2
from overlap import ascend, hopper, rates, seconds, simulate, timeline, times

BOTH = pytest.mark.parametrize("core", [ascend(), hopper()], ids=lambda core: core.chip)


@BOTH
@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_no_unit_does_two_things_and_no_stage_comes_before_its_input(core, turns, steps):
    slots = simulate(core.stages, steps, turns)
    assert len(slots) == len(core.stages) * steps
    of_unit, of_step = defaultdict(list), defaultdict(list)
    for slot in slots:
        of_unit[slot.unit].append(slot)
        of_step[slot.step].append(slot)
    for some in of_unit.values():
        some.sort(key=lambda slot: slot.start)
        assert all(a.end <= b.start for a, b in zip(some, some[1:]))
    for step in range(steps):
        assert [slot.stage for slot in of_step[step]] == [name for name, *_ in core.stages]
        assert all(a.end <= b.start for a, b in zip(of_step[step], of_step[step][1:]))


@BOTH
def test_one_after_another_takes_the_sum_and_turns_the_busier_unit(core):
    unit = defaultdict(float)
    for _, name, time in core.stages:
        unit[name] += time
    assert seconds(core, 10, False) == pytest.approx(10 * sum(unit.values()))
    step = (seconds(core, 30, True) - seconds(core, 20, True)) / 10
    assert step == pytest.approx(max(unit.values()))


@pytest.mark.parametrize("N", [16384, 32768])
def test_long_sequences_are_within_5_percent_of_the_published_times(N):
    row = times(ascend(), N)
    assert row.by_hand == PUBLISHED_910B2[N][0]
    assert abs(row.turns / row.by_hand - 1) < 0.05
    assert row.serial > 1.7 * row.by_hand  # one after another does not explain them


def test_short_sequences_are_too_fast_since_the_model_leaves_out_what_they_pay():
    assert all(times(ascend(), N).turns < 0.9 * PUBLISHED_910B2[N][0]
               for N in (1024, 2048, 4096, 8192))


def test_the_rates_are_those_of_the_stages():
    row = rates(ascend())
    step, clock = 4 * 128 * 256 * 128, 353.8e12 / 24 / 8192
    assert row.serial_tflops == pytest.approx(step * 24 * clock / (2487 + 2489 + 1617 + 834) / 1e12)
    assert row.turns_tflops == pytest.approx(step * 24 * clock / (2487 + 1617) / 1e12)
    assert (round(row.serial_tflops, 1), round(row.turns_tflops, 1)) == (97.6, 176.6)


def test_an_h100_loses_a_third_where_exponentials_wait():
    """512 FLOPs of products for each exponential, which is 989 / 3.9 times as slow."""
    row = rates(hopper())
    assert row.serial_share == pytest.approx(1 / (1 + 989 / 3.9 / 512))
    assert row.turns_share == pytest.approx(1)


def test_blocks_that_do_not_fill_the_cores_cost_a_whole_round():
    core = ascend()
    assert [times(core, N).rounds for N in (1, 24 * 128, 24 * 128 + 1, 32768)] == [1, 1, 2, 11]
    assert times(core, 24 * 128 + 1).turns > 1.9 * times(core, 24 * 128).turns
    assert times(core, 1000).by_hand is None


def test_the_timeline_shows_each_unit_as_long_as_it_works():
    core = ascend()
    serial, turns = ([line.split("|")[1] for line in timeline(core, in_turns)]
                     for in_turns in (False, True))
    for cube, vector in (serial, turns):
        assert {*cube} == {*"QqPp "} and {*vector} == {*"SsUu "}
    assert not any(a != " " and b != " " for a, b in zip(*serial))
    assert any(a != " " and b != " " for a, b in zip(*turns))
    assert len("".join(turns).replace(" ", "")) == pytest.approx(
        len("".join(serial).replace(" ", "")), abs=4)
    assert len(turns[0].rstrip()) < 0.7 * len(serial[0].rstrip())


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["overlap.py", *map(str, arguments)])
    return overlap.main()


def test_the_command_prints_draws_and_writes_what_it_found(monkeypatch, capsys, tmp_path):
    written = tmp_path / "rows.json"
    assert run(monkeypatch, "--json", written, "--plot", tmp_path) == 0
    printed = capsys.readouterr().out
    for said in ("97.6", "176.6", "661", "torch_npu (theirs)", "in turns", "start of the call"):
        assert said in printed
    rows = json.loads(written.read_text())["rows"]
    assert [r["N"] for r in rows if r["tool"] == "times"] == [*PUBLISHED_910B2]
    assert [r["chip"] for r in rows if r["tool"] == "rates"] == ["910B2", "H100-SXM"]
    assert (tmp_path / "overlap.png").stat().st_size > 5000


def test_a_length_without_published_times_stands_alone_and_too_long_a_one_is_refused(
        monkeypatch, capsys):
    assert run(monkeypatch, "--seq-len", 1000) == 0
    assert [line.split("|")[-2].strip() for line in capsys.readouterr().out.splitlines()
            if line.startswith("| 1000")] == ["-"]
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "--seq-len", 2**22 + 1)
    assert ended.value.code == 2 and "at most 4194304" in capsys.readouterr().err

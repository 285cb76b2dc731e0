"""Attention over several processes: equal to one process, counted to the byte, and no rank hangs or
is left behind.

Run as a program, this file is a rank of these tests: see `JOBS`.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

PHASE = Path(__file__).resolve().parent.parent
sys.path[:0] = [] if "pytest" in sys.modules else [str(PHASE), str(PHASE.parent)]
import flash_ring
import torch
import torch.distributed as dist
from common import cli
from flash_ring import meeting, positions, ring_attention, ulysses_attention
from lab import processes, ring_costs, ring_tools
from lab.cases import Case
from lab.judge import exact, judge
from lab.ring_link import Link

HERE, CPU = [sys.executable, __file__], torch.device("cpu")
RANKS = {1: [3], 2: [1, 3], 3: [0, 2, 3], 4: [0, 1, 2, 3]}  # groups of four processes
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
FORMS = {"ring": ring_attention, "zigzag": partial(ring_attention, zigzag=True),
         "ulysses": ulysses_attention}
N = 24


def case_of(P, dtype, causal, heads=True):
    many = {"heads": 2 * P, "kv_heads": P} if heads else {}
    return Case(N, batch=2, d=8, dv=6, dtype=dtype, causal=causal, **many)


# The ranks


def results(case, name, P, group):
    """Return O, dQ, dK, dV of all rows, and the bytes that this rank sent forward and backward."""
    rank = dist.get_rank(group)
    mine = positions(rank, P, N, name == "zigzag")
    inputs = [x[..., mine, :].mT.contiguous().mT for x in case.inputs("cpu", 0, dO=True)]
    leaves = [x.requires_grad_() for x in inputs[:3]]
    sent = [Link.sent]
    O = FORMS[name](*leaves, causal=case.causal, group=group)
    sent.append(Link.sent)
    found = [O.detach(), *torch.autograd.grad(O, leaves, inputs[3])]
    sent.append(Link.sent)
    parts = [None] * P
    dist.all_gather_object(parts, found, group=group)
    order = torch.cat([positions(r, P, N, name == "zigzag") for r in range(P)]).argsort()
    whole = [torch.cat(some, dim=-2)[..., order, :] for some in zip(*parts)]
    return whole, (sent[1] - sent[0], sent[2] - sent[1])


def large_scores():
    """Return Q, K, V whose scores are 8192 and some sixteenths, exact in float32."""
    generator = torch.Generator().manual_seed(0)
    Q, K = (torch.randint(-8, 8, (1, N, 4), generator=generator).float() / 4 for _ in range(2))
    Q[..., 0], K[..., 0] = 64.0, 128.0
    return Q, K, torch.randn(1, N, 4, generator=generator)


def compute_all(path):
    """All that several ranks compute for these tests; rank 3, which is in each group, keeps it."""
    processes.join(CPU, 30)
    rank, found = dist.get_rank(), {}
    groups = {P: dist.new_group(ranks) for P, ranks in RANKS.items()}
    for P, ranks in RANKS.items():
        for dtype in DTYPES if rank in ranks else ():
            for causal in (False, True):
                for name in FORMS:
                    case = case_of(P, dtype, causal)
                    found[P, dtype, causal, name] = results(case, name, P, groups[P])
        if rank in ranks:
            found[P, "no heads"] = results(
                case_of(P, torch.float64, True, heads=False), "zigzag", P, groups[P])[0]
    mine = positions(rank, 4, N)
    Q, K, V = (x[:, mine] for x in large_scores())
    parts = processes.gather(ring_attention(Q, K, V, scale=1.0))
    found["large scores"] = torch.cat(parts, dim=1)
    half = [x[:, positions(rank, 4, 4096)].bfloat16() for x in Case(4096, d=8).inputs("cpu", 0)]
    found["half"] = torch.cat(processes.gather(ring_attention(*half)), dim=1)
    with torch.autocast("cpu", torch.bfloat16):
        found["autocast"] = ring_attention(Q, K, V).dtype, ulysses_attention(
            *(x[:, None].expand(1, 4, 6, 4) for x in (Q, K, V))).dtype
    found["refused"] = [refusal(call) for call in (
        lambda: ring_attention(Q, K[:, :4], V[:, :4]),
        lambda: ring_attention(Q[:, :3], K[:, :3], V[:, :3], zigzag=True),
        lambda: ulysses_attention(*(x[:, None].expand(1, 6, 6, 4) for x in (Q, K, V))),
        lambda: ring_attention(Q, K, V.double()))]
    shape = {"N": N, "n_layer": 1, "n_head": 2, "n_embd": 16}
    trainings = [flash_ring.Training(flash_ring.TEXT.read_text(), shape, ("flash",), 2)
                 for _ in range(2)]
    for training in trainings:
        training.models["flash"].double()
    found["train"] = ring_tools.train(*trainings, partial(ring_attention, zigzag=True),
                                      positions(rank, 4, N, zigzag=True), 4)
    if rank == 3:
        torch.save(found, path)
    processes.leave()
    return 0


def refusal(call):
    try:
        call()
    except (ValueError, TypeError) as fault:
        return str(fault)


def fault(kind):
    """Go round a ring; rank 1 fails on the way."""
    processes.join(CPU, 2)
    for turn in range(100):
        if turn == 3 and os.environ["RANK"] == "1":
            if kind == "raise":
                raise ZeroDivisionError("planted")
            os.kill(os.getpid(), getattr(signal, kind))
        Link.pass_on([torch.ones(4)], None)()
    return 0


def sleep(folder):
    (Path(folder) / f"pid{os.getpid()}").touch()
    time.sleep(100)


JOBS = {"compute": compute_all, "fault": fault, "sleep": sleep}


def parents(folders):
    """Fork a process for each folder that starts a rank; print their pids and how they ended."""
    pids = []
    for folder in folders:
        pids.append(os.fork())
        if not pids[-1]:
            cli.serve(lambda folder=folder: processes.start(1, [*HERE, "sleep", folder]))
    print(json.dumps(pids), flush=True)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]))


if __name__ == "__main__":
    if sys.argv[1] == "parents":
        sys.exit(parents(sys.argv[2:]))
    sys.exit(processes.as_rank(partial(JOBS[sys.argv[1]], sys.argv[2])))

import pytest  # noqa: E402  a rank needs none


@pytest.fixture(autouse=True)
def _keep_handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("ring") / "found.pt"
    assert processes.start(4, [*HERE, "compute", str(path)]) == 0
    return torch.load(path, weights_only=False)


EACH = pytest.mark.parametrize("P, dtype, causal, name", [
    (P, dtype, causal, name) for P in RANKS for dtype in DTYPES for causal in (False, True)
    for name in FORMS])


# Equal to one process


def assert_right(case, whole):
    """Judge O, dQ, dK and dV against float64 by the 2x and 3x rules; float64 within 1e-12."""
    Q, K, V, dO = case.inputs("cpu", 0, dO=True)
    standard = partial(flash_ring.standard_attention, **case.masks)
    for names, expected in (("O", exact(case, Q, K, V)), ("dQ dK dV", exact(case, Q, K, V, dO))):
        gradients = names != "O"
        ours = whole[1:] if gradients else whole[:1]
        theirs = ring_tools.results_of(standard, Q, K, V, dO if gradients else None)
        for name, x, y, (reference, floor) in zip(names.split(), ours, theirs, expected):
            assert x.dtype == case.dtype and x.shape == y.shape
            _, error, _, passed = judge(x, y, reference, floor, 3 if gradients else 2)
            assert passed, (name, error)
            assert case.dtype != torch.float64 or error < 1e-12, (name, error)


@EACH
def test_ranks_give_what_one_process_gives(found, P, dtype, causal, name):
    assert_right(case_of(P, dtype, causal), found[P, dtype, causal, name][0])


@pytest.mark.parametrize("P", RANKS)
def test_a_ring_takes_tensors_without_heads(found, P):
    assert_right(case_of(P, torch.float64, True, heads=False), found[P, "no heads"])


def test_the_merge_keeps_log_l_beside_a_large_m(found):
    Q, K, V = (x.double() for x in large_scores())
    right = torch.softmax(Q @ K.mT, dim=-1) @ V
    assert (Q @ K.mT).min() > 8000
    torch.testing.assert_close(found["large scores"].double(), right, rtol=0, atol=2e-6)


def test_half_types_are_rounded_once_and_not_at_each_hop(found):
    Q, K, V = (x.bfloat16().double() for x in Case(4096, d=8).inputs("cpu", 0))
    right = torch.softmax(Q @ K.mT / math.sqrt(8), dim=-1) @ V

    def error(x):
        return (x.double() - right).square().mean().sqrt()

    assert error(found["half"]) < 1.1 * error(right.bfloat16())


def test_autocast_gives_its_dtype(found):
    assert found["autocast"] == (torch.bfloat16, torch.bfloat16)


def test_a_gpt_whose_text_is_split_learns_as_in_one_process(found):
    rows = found["train"]
    assert len(rows) == 4 and all(abs(r.loss - r.loss_split) < 1e-12 and r.passed for r in rows)
    assert rows[3].loss < rows[0].loss


# What is sent, and who computes what


@EACH
def test_the_bytes_sent_are_those_of_the_formula(found, P, dtype, causal, name):
    case = case_of(P, dtype, causal)
    (B, H, _, d), (_, Hkv, _, _), (*_, dv) = case.shapes
    n, e = N // P, dtype.itemsize
    if name == "ulysses":
        wanted = (B * n * (H * d + Hkv * d + Hkv * dv + H * dv) * e * (P - 1) // P,) * 2
    else:
        block = B * n * Hkv * (d + dv)
        forward = (P - 1) * block * e
        wanted = forward, forward + P * block * max(4, e) * (P > 1)
    assert found[P, dtype, causal, name][1] == wanted
    bytes_of = ring_costs.ulysses_bytes if name == "ulysses" else ring_costs.ring_bytes
    assert bytes_of(case, P) == wanted


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("P", [1, 2, 3, 4, 5])
def test_each_pair_that_causal_keeps_is_computed_once(P, zigzag):
    n = 6
    seen, pairs = torch.zeros(P * n, P * n, dtype=torch.int), []
    for rank in range(P):
        mine = positions(rank, P, P * n, zigzag)
        for source in range(P):
            met = meeting(rank, source, n, True, zigzag)
            if met:
                rows, cols, triangle = met
                block = torch.ones(n, n, dtype=torch.int)[rows, cols]
                theirs = positions(source, P, P * n, zigzag)
                seen[mine[rows, None], theirs[cols]] += block.tril() if triangle else block
        pairs.append(int(seen[mine].sum()))
    assert torch.equal(seen, torch.ones_like(seen).tril())
    assert not zigzag or len(set(pairs)) == 1
    assert zigzag or pairs == sorted(set(pairs))


def test_what_is_no_call_is_refused_before_anything_is_sent(found):
    rows, odd, heads, dtype = found["refused"]
    assert "K must have as many rows as Q on a rank" in rows
    assert "zigzag takes an even number of rows" in odd
    assert "heads of Q and of K that 4 ranks divide" in heads
    assert "V must have Q's dtype" in dtype


def test_links_are_hidden_from_where_a_block_takes_as_long_to_compute_as_to_send():
    links, H, Hkv, d = ring_costs.LINKS[1], 8, 2, 128
    peak = ring_costs.CHIPS[links.chip].peak
    for backward, causal in ((False, False), (False, True), (True, False)):
        n = ring_costs.least_rows(links, backward, causal, G=H // Hkv)
        flop = (10 if backward else 4) * n**2 * d * H / (2 if causal else 1)
        sent = 2 * n * d * Hkv * (2 + 4 * backward)
        assert flop / peak == pytest.approx(sent / links.one)
    assert [round(ring_costs.least_rows(x)) for x in ring_costs.LINKS] == [1040, 10532]


# Ranks that fail, and who started them


@pytest.mark.parametrize("kind, words, status", [
    ("raise", "rank 1: ZeroDivisionError: planted (test_ring.py, line", 1),
    ("SIGKILL", "rank 1 was ended by SIGKILL", 1),
    ("SIGSTOP", "rank 1 does not answer; rank 0: RuntimeError: waited for ranks 1 and 1", 1)])
def test_a_rank_that_fails_ends_all_with_one_line(capfd, kind, words, status):
    begun = time.monotonic()
    assert processes.start(2, [*HERE, "fault", kind]) == status
    [line] = capfd.readouterr().err.splitlines()
    assert words in line and time.monotonic() - begun < 60


LOST = "waited for ranks 1 and 3: Connection closed by peer"


@pytest.mark.parametrize("codes, told, words, status", [
    ([1, 0, 0, 0], {}, "", 1),  # a comparison failed
    ([1, 0, 7, 1], {0: LOST, 3: LOST}, "rank 2 ended with 7", 1),
    ([1, 1, 1, 1], {0: LOST, 1: LOST, 3: LOST}, "rank 2 ended with 1", 1),
    ([1, -6, 1, 1], {0: LOST, 2: "planted", 3: LOST}, "rank 2: planted", 1),
    ([1, None], {0: "RuntimeError: Wait timeout"},
     "rank 1 does not answer; rank 0: RuntimeError: Wait timeout", 1),
    ([1, -9, 1, 1], {0: LOST, 2: LOST, 3: LOST}, "rank 1 was ended by SIGKILL", 1),
    ([1, None, 1, 1], {3: LOST, 0: LOST, 2: LOST}, f"rank 1 does not answer; rank 3: {LOST}", 1),
    ([2, 2, 2, 2], {1: "no room", 0: "no room", 2: "no room"}, "rank 1: no room", 2)])
def test_the_line_names_the_fault_that_the_others_follow_from(tmp_path, codes, told, words, status):
    for at, (rank, line) in enumerate(told.items()):
        (tmp_path / f"fault{rank}").write_text(json.dumps([at, status, f"rank {rank}: {line}"]))
    assert processes._first_fault(codes, tmp_path) == (status, words)


def test_a_rank_that_still_waits_is_not_taken_for_the_silent_one(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(processes, "GRACE", 0.01)
    asked = []

    def tell(rank):
        (tmp_path / f"fault{rank}").write_text(json.dumps([rank, 1, f"rank {rank}: {LOST}"]))
        return 1

    def poll_0():  # it gives up later than rank 2
        asked.append(0)
        return tell(0) if len(asked) > 3 else None

    polls = poll_0, lambda: None, lambda: tell(2)
    assert processes._watch([SimpleNamespace(poll=poll) for poll in polls], tmp_path) == 1
    assert f"rank 1 does not answer; rank 0: {LOST}" in capsys.readouterr().err


def test_no_rank_outlives_who_started_it(tmp_path):
    ends = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}
    folders = [tmp_path / number.name for number in ends]
    for folder in folders:
        folder.mkdir()
    program = subprocess.Popen([*HERE, "parents", *map(str, folders)], stdout=subprocess.PIPE)
    ranks = [wait_for(lambda folder=folder: pids(folder)) for folder in folders]
    for number, parent, [rank] in zip(ends, json.loads(program.stdout.readline()), ranks):
        assert runs(rank)
        os.kill(parent, number)
        assert wait_for(lambda rank=rank: not runs(rank))
    assert json.loads(program.communicate(timeout=60)[0]) == list(ends.values())


def pids(folder):
    return [int(path.name[3:]) for path in folder.glob("pid*")]


def runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
    return condition()


# The command line


def call(monkeypatch, *options):
    """Run the lesson with these options; return its exit status."""
    monkeypatch.setattr(sys, "argv", [flash_ring.__file__, *map(str, options)])
    with pytest.raises(SystemExit) as ended:
        cli.serve(flash_ring.main)
    return ended.value.code


def test_all_modes_run_on_two_ranks(monkeypatch, tmp_path, capfd):
    path = tmp_path / "ring.json"
    options = "--ranks 2 --mode all --seq-len 32 --head-dim 8 --steps 2 --json".split()
    assert call(monkeypatch, *options, path) == 0
    rows = json.loads(path.read_text())["rows"]
    of = {tool: [r for r in rows if r["tool"] == tool] for tool in flash_ring.MODES}
    assert len(of["verify"]) == 3 * (2 + 3) * 4 and all(r["passed"] for r in of["verify"])
    assert {(r["name"], r["rank"]): r["pairs"] for r in of["memory"]} == {
        ("ring", 0): 136, ("ring", 1): 392, ("zigzag", 0): 264, ("zigzag", 1): 264,
        ("ulysses", 0): 264, ("ulysses", 1): 264}
    assert all(r["passed"] and r["peak_bytes"] > 0 for r in of["memory"])
    assert [r["name"] for r in of["speed"][:4]] == ["one rank alone", "ring", "zigzag", "ulysses"]
    assert [r["link"] for r in of["speed"][4:]] == ["as it is", "slowed down"]
    assert len(of["train"]) == 2 and all(r["passed"] for r in of["train"])
    errors = [(r["wide"], r["O"], r["O_m_l"]) for r in of["merge"]]
    assert errors[-1][0] < 1.01 * errors[0][0] and errors[-1][1] > 3 * errors[0][1]
    assert errors[-1][2] > errors[-1][1] and len(of["links"]) == 2
    shown = capfd.readouterr().out
    assert shown.count("device: cpu") == 1 and "FAIL" not in shown and "NO" not in shown


@pytest.fixture
def torchrun(monkeypatch):
    """Make this process a rank as torchrun does."""
    monkeypatch.setattr(processes.console, "quiet", False)  # a rank changes it

    def become(rank, ranks):
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", ranks),
                            ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", 0)):
            monkeypatch.setenv(name, str(value))

    return become


def test_a_rank_that_torchrun_started_joins_the_others(torchrun, monkeypatch, capsys):
    torchrun(0, 1)
    assert call(monkeypatch, *"--mode memory --seq-len 16 --device cpu".split()) == 0
    assert "on 1 ranks" in capsys.readouterr().out and not dist.is_initialized()


@pytest.mark.parametrize("rank", [0, 1])
def test_what_all_ranks_are_refused_rank_0_tells(torchrun, monkeypatch, capsys, rank):
    torchrun(rank, 2)
    assert call(monkeypatch, "--heads", "3", "--device", "cpu") == 2
    said = capsys.readouterr().err
    wanted = (f"{flash_ring.__file__}: argument --heads: a multiple of 2 for ulysses is taken, "
              "got 3; or take --attention ring\n")
    assert said == ("" if rank else wanted)


def test_what_one_rank_is_refused_it_tells_itself(torchrun, monkeypatch, capsys):
    torchrun(1, 2)
    assert processes._tell(cli.Refused("no card")) == 2
    assert capsys.readouterr().err.endswith(": rank 1: no card\n")


def test_what_ranks_are_refused_is_one_line_and_2(torchrun, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv(processes.FOLDER, str(tmp_path))
    for rank in (0, 1):
        torchrun(rank, 2)
        options = cli.Parser(None)
        processes.add_options(options)
        with pytest.raises(processes.AllRefused) as refused:
            options.parse_args(["--ranks", "0"])
        assert processes._tell(refused.value) == 2
    assert processes._first_fault([2, 2], tmp_path) == (
        2, "argument --ranks: a whole number from 1 to 64 is taken, got '0'")
    assert not capsys.readouterr().err


def test_a_card_that_is_named_is_taken_and_more_ranks_than_cards_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(processes, "choose", torch.device)
    cards = SimpleNamespace(device_count=lambda: 2)
    monkeypatch.setattr(processes, "accelerator", lambda kind: cards if kind == "cuda" else None)
    started = []
    monkeypatch.setattr(processes, "start", lambda ranks, command: started.append(command) or 0)
    for options, device in (("--ranks 2 --device cuda", "cuda"), ("--ranks 3", "cpu"),
                            ("--ranks 1 --device cuda:1", "cuda:1")):
        assert call(monkeypatch, *options.split()) == 0
        assert started.pop()[-2:] == ["--device", device]
    assert call(monkeypatch, "--ranks", "3", "--device", "cuda") == 2
    assert "a card of its own and 2 are seen, got 3" in capsys.readouterr().err and not started


def test_a_rank_keeps_the_card_that_is_named_or_takes_its_own(torchrun, monkeypatch):
    monkeypatch.setattr(processes, "choose", torch.device)
    for rank, ranks, name, device in ((0, 1, "cuda:1", "cuda:1"), (1, 2, "cuda", "cuda:1"),
                                      (1, 2, "cpu", "cpu")):
        torchrun(rank, ranks)
        args = SimpleNamespace(device=name, ranks=None)
        assert processes.check(args, cli.Parser(None)).type == device.partition(":")[0]
        assert args.device == device


@pytest.mark.parametrize("options, words", [
    ("--seq-len 12", "argument --seq-len: N must be a multiple of 8 for 4 ranks, zigzag, got 12"),
    ("--attention ring --seq-len 6", "N must be a multiple of 4 for 4 ranks, got 6"),
    ("--heads 6", "argument --heads: a multiple of 4 for ulysses is taken, got 6"),
    ("--heads 4 --kv-heads 2", "argument --kv-heads: a multiple of 4 for ulysses is taken, got 2"),
    ("--device npu:0", "each rank takes a card of its own, got 'npu:0'"),
    ("--ranks 65", "a whole number from 1 to 64 is taken, got '65'"),
    ("--mode train --heads 8", "argument --heads: --mode train takes none"),
    ("--mode links --seq-len 8", "argument --seq-len: --mode links takes none"),
    ("--attention ring --mode all --seq-len 4", "a multiple of 8 for 4 ranks, zigzag, got 4"),
    ("--plot figures", "argument --plot: merge is drawn, got --mode verify"),
    ("--device foo", "device must be auto, cpu, cuda[:i] or npu[:i], got 'foo'"),
    ("--ranks 3 --attention ring --heads 4 --kv-heads 3", "of --heads is taken, got 3 of 4"),
    ("--seq-len 2000000000 --attention ring", "Q, K and V of 1x8x2000000000x64"),
    ("--seq-len 131072", "argument --seq-len: verify 1x8x131072x64 1x4x131072x64 1x4x131072x64 "
     "on 4 ranks needs 32768.0 GiB on cpu"),
])
def test_what_can_not_be_served_ends_with_one_line_and_2(monkeypatch, capsys, options, words):
    for place, name in ((processes, "start"), (torch, "arange")):  # no rank, and no positions
        monkeypatch.setattr(place, name, lambda *_, name=name: pytest.fail(name))
    assert call(monkeypatch, *options.split()) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert words in line


def test_a_torch_without_distributed_ends_with_one_line_and_2(monkeypatch, capsys):
    monkeypatch.setattr(dist, "is_available", lambda: False)
    assert call(monkeypatch) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "is built without torch.distributed" in line


def test_the_trap_is_drawn(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    assert call(monkeypatch, "--mode", "merge", "--plot", tmp_path) == 0
    assert (tmp_path / "ring_merge.png").read_bytes()[:4] == b"\x89PNG"

"""Phase 8's model, small enough for a laptop: it learns to write like a text, letter by letter.

    python mini_gpt.py                      train with standard and with flash attention, compare
    python mini_gpt.py --plot DIR           draw both loss curves as well
    TRITON_INTERPRET=1 python mini_gpt.py --attention standard triton --steps 3 --layers 1 --heads 1

Both start from the same weights and read the same batches, so that their losses differ by rounding
alone.
"""

import statistics
import sys
from dataclasses import dataclass
from functools import partial
from os.path import dirname, realpath
from pathlib import Path

sys.path.insert(0, dirname(realpath(__file__)))  # `python -I` leaves it out
from lab import lesson
from common import cli
from common.memory import measure_peak
from common.report import console, mib, plotted, print_table, progress
from common.timing import time_call
from flash_attention import standard_attention
from flash_backward import flash_attention
from flash_decoding import KVCache
from lab.bench import need_room
from lab.fused import fused_attention

import torch
import torch.nn.functional as F
from torch import nn


def triton_attention(Q, K, V, causal):
    import flash_triton  # not at the top: Triton is not everywhere
    why_not = flash_triton.unserved(Q.device)
    if why_not:
        raise cli.Refused(f"attention triton on {Q.device}: {why_not}")
    return flash_triton.flash_attention_triton(Q, K, V, causal=causal)


ATTENTION = {"standard": standard_attention, "flash": flash_attention, "fused": fused_attention,
             "triton": triton_attention}
BOTH = ("standard", "flash")
TEXT = Path(__file__).resolve().parent.parent / "LICENSE"
# Adam divides a gradient by its size: with the usual eps of 1e-8, one that is 0 but for rounding,
# as of the bias of K, takes steps as long as any other, and different ones with each attention.
ADAMW = {"lr": 1e-3, "eps": 1e-6}
ALLOWED = 1e-3  # between the loss curves, in float32


class CausalSelfAttention(nn.Module):
    """Phase 8's module in nanoGPT's shape, [B, N, C] -> [B, N, C], its attention chosen by name.

    attention: a name of ATTENTION. Q, K and V are strided views of one projection.
    """

    def __init__(self, n_embd, n_head, attention="standard"):
        super().__init__()
        if attention not in ATTENTION:
            raise ValueError(f"attention must be one of {', '.join(ATTENTION)}, got {attention!r}")
        if n_embd % n_head:
            raise ValueError(f"n_head must divide n_embd, got {n_head} and {n_embd}")
        self.n_head, self.attend = n_head, ATTENTION[attention]
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x, cache=None):
        """cache: takes the new K and V and returns all so far, as flash_decoding.KVCache does."""
        Q, K, V = (
            part.unflatten(-1, (self.n_head, -1)).transpose(1, 2)  # [B, N, C] -> [B, H, N, C/H]
            for part in self.c_attn(x).chunk(3, dim=-1))
        if cache is not None:
            K, V = cache.append(K, V)  # [B, H, length, C/H]
        O = self.attend(Q, K, V, causal=True)  # [B, H, N, C/H]
        return self.c_proj(O.transpose(1, 2).flatten(-2))  # [B, N, C]


class Block(nn.Module):
    """Attention and a two-layer perceptron, each on a normalized input and added to it."""

    def __init__(self, n_embd, n_head, attention):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head, attention)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd)
        )

    def forward(self, x, cache=None):
        x = x + self.attn(self.ln_1(x), cache)
        return x + self.mlp(self.ln_2(x))


class MiniGPT(nn.Module):
    """GPT-2's architecture (nanoGPT's model.py): tokens [B, n] -> logits [B, n, vocabulary].

    N: the context, the most tokens that it reads at once; more raise ValueError. attention: a name
    of ATTENTION; the weights are drawn in the same order for each.
    """

    def __init__(self, vocabulary, N=256, n_layer=2, n_head=4, n_embd=96, attention="flash"):
        super().__init__()
        self.N, self.n_head, self.n_embd = N, n_head, n_embd
        self.wte, self.wpe = nn.Embedding(vocabulary, n_embd), nn.Embedding(N, n_embd)
        self.blocks = nn.ModuleList(Block(n_embd, n_head, attention) for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens, caches=None):
        first = caches[0].length if caches else 0  # the position of tokens[:, 0]
        if first + tokens.shape[1] > self.N:
            raise ValueError(f"tokens must be at most N {self.N}, got {first + tokens.shape[1]}")
        position = torch.arange(first, first + tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(position)  # [B, n, C]
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks)):
            x = block(x, cache)
        return self.ln_f(x) @ self.wte.weight.T  # [B, n, vocabulary], GPT-2's one table for both

    def new_caches(self, batch):
        """Return an empty KVCache for each block."""
        shape, weight = (batch, self.n_head, self.N, self.n_embd // self.n_head), self.wte.weight
        return [KVCache(*shape, dtype=weight.dtype, device=weight.device) for _ in self.blocks]


@torch.no_grad()
def generate(model, tokens, count, *, cached=True, seed=0):
    """Return tokens [B, n], n >= 1, with `count` more, each drawn by the model's probabilities.

    cached: keep K and V of the tokens so far and read one token a step; otherwise read all of them
    again. The tokens are the same. When the context is full, its later half becomes the new one.
    """
    generator = torch.Generator().manual_seed(seed)
    start, caches = 0, None  # where the context begins
    for _ in range(count):
        if tokens.shape[1] - start > model.N:
            start, caches = tokens.shape[1] - max(1, model.N // 2), None
        unread = tokens[:, start:]
        if cached and caches is None:
            caches = model.new_caches(len(tokens))
        elif cached:
            unread = tokens[:, -1:]
        P = torch.softmax(model(unread, caches)[:, -1].float(), dim=-1).cpu()  # [B, vocabulary]
        drawn = torch.multinomial(P, 1, generator=generator).to(tokens.device)  # [B, 1]
        tokens = torch.cat([tokens, drawn], dim=1)
    return tokens


class Training:
    """Models that learn side by side, one for each name in `attention`: same start, same batches.

    text: what they learn from, longer than N. shape: MiniGPT's N, n_layer, n_head, n_embd. batch:
    pieces of N characters a step. losses, seconds: {name: [one a step]}.
    Raises ValueError for a text that is too short, and what MiniGPT raises.
    """

    def __init__(self, text, shape, attention=BOTH, batch=8, *, device="cpu", seed=0):
        if len(text) <= shape["N"]:
            raise ValueError(f"text must be longer than N {shape['N']}, got {len(text)} letters")
        self.vocabulary = sorted(set(text))
        self.tokens = self.encode(text)  # [T]
        self.N, self.batch, self.n_embd = shape["N"], batch, shape["n_embd"]
        self.device, self.generator = torch.device(device), torch.Generator().manual_seed(seed)
        self.models, self.optimizers = {}, {}
        for name in attention:
            with torch.random.fork_rng(devices=[]):  # the caller's random state stays as it is
                torch.default_generator.manual_seed(seed)
                model = MiniGPT(len(self.vocabulary), **shape, attention=name).to(device)
            self.models[name] = model
            self.optimizers[name] = torch.optim.AdamW(model.parameters(), **ADAMW)
        self.losses, self.seconds = ({name: [] for name in attention} for _ in range(2))

    def encode(self, text):
        """Return the tokens of a text, [len(text)]."""
        number = {letter: i for i, letter in enumerate(self.vocabulary)}
        return torch.tensor([number[letter] for letter in text])

    def decode(self, tokens):
        """Return the text of tokens [n]."""
        return "".join(self.vocabulary[token] for token in tokens.tolist())

    @property
    def steps(self):
        """How many steps are done."""
        return len(next(iter(self.losses.values())))

    def next_batch(self):
        """Return x and y [batch, N]: pieces of the text, and the same one character further on."""
        last = len(self.tokens) - self.N
        start = torch.randint(last, (self.batch, 1), generator=self.generator)
        place = start + torch.arange(self.N)  # [batch, N]
        return self.tokens[place].to(self.device), self.tokens[place + 1].to(self.device)

    def learn(self, name, x, y):
        """Let one model learn from a batch. Returns its loss before that, a scalar tensor."""
        loss = F.cross_entropy(self.models[name](x).flatten(0, 1), y.flatten())
        loss.backward()
        self.optimizers[name].step()
        self.optimizers[name].zero_grad()
        return loss.detach()

    def step(self):
        """Let each model learn from the next batch."""
        x, y = self.next_batch()
        for name in self.models:
            loss = []
            seconds = time_call(lambda n=name, l=loss: l.append(self.learn(n, x, y)), self.device)
            self.seconds[name].append(seconds)
            self.losses[name].append(loss[0].item())


def train(training, steps):
    """Take `steps` steps."""
    with progress("train", steps) as advance:
        for _ in range(steps):
            training.step()
            advance()


def measure_steps(training):
    """Return {name: peak bytes of a step}. The models learn from it: take a Training of its own."""
    x, y = training.next_batch()
    peaks = {}
    for name in training.models:
        training.learn(name, x, y)  # the optimizer allocates its state in the first step
        peaks[name] = measure_peak(lambda n=name: training.learn(n, x, y), training.device).total
    return peaks


@dataclass
class TrainRow:
    """seconds: median of a step. max_diff: between its losses and those of the first row."""

    name: str
    shape: str
    steps: int
    losses: list
    max_diff: float
    seconds: float
    peak_bytes: int
    passed: bool


def compare(training, peaks):
    """Return a TrainRow a model. A row passes where max_diff is at most ALLOWED."""
    rows, shape = [], f"{training.batch}x{training.N}x{training.n_embd}"
    curves = torch.tensor(list(training.losses.values()), dtype=torch.float64)
    differences = (curves - curves[0]).abs().amax(dim=1).tolist()  # NaN stays NaN
    for (name, losses), max_diff in zip(training.losses.items(), differences):
        seconds = statistics.median(training.seconds[name] or [0.0])
        measured = losses, max_diff, seconds, peaks[name], max_diff <= ALLOWED
        rows.append(TrainRow(name, shape, training.steps, *measured))
    return rows


# The command line


def show_rows(rows):
    print_table(
        "Training: the same start, the same batches",
        ["attention", "B x N x C", "steps", "first loss", "last loss", "largest difference",
         "ms a step", "peak of a step, MiB"],
        [(r.name, r.shape, r.steps, *(f"{loss:.4f}" for loss in (r.losses[0], r.losses[-1])),
          f"{r.max_diff:.1e}", f"{r.seconds * 1e3:.4g}", mib(r.peak_bytes)) for r in rows],
    )


def show_sample(training, count=250):
    """Print what the last model writes; return whether it writes the same without the KV cache."""
    model = list(training.models.values())[-1]
    text = training.decode(training.tokens)
    prompt = training.encode((text.lstrip() or text)[:8]).to(training.device)
    written, seconds = [], []
    for cached in (True, False):
        call = partial(generate, model, prompt[None], count, cached=cached)
        seconds.append(time_call(lambda c=call: written.append(c()), training.device))
    same = torch.equal(*written)
    console.print(
        f"\n{count} letters: {seconds[0]:.2f} s with the KV cache, {seconds[1]:.2f} s without, "
        f"{'the same text' if same else 'ANOTHER TEXT'}\n\n{training.decode(written[0][0])}")
    return same


def plot(rows, path):
    """Draw the loss curves over each other, and below how far each is from the first."""
    differences = [[abs(a - b) for a, b in zip(row.losses, rows[0].losses)] for row in rows[1:]]
    with plotted(path, 2, 1, sharex=True, figsize=(7, 5), height_ratios=(3, 1)) as (above, below):
        for row, style in zip(rows, ("-", "--", ":")):
            above.plot(row.losses, style, label=row.name)
        for difference in differences:
            below.plot(difference, color="grey")
        above.set(ylabel="loss", title=f"Training with each attention ({rows[0].shape})")
        below.set(ylabel="difference", xlabel="step")
        if any(any(difference) for difference in differences):
            below.set(yscale="log")
        above.legend()


def read(path, options):
    """Return the text of a file; a call whose file is not UTF-8 is refused."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as fault:
        options.error(f"argument --text: UTF-8 is read, got {str(path)!r}: {fault}")


def main():
    number = cli.whole_number(1)
    options = lesson.parser(__doc__, "device", "seed", "json", "plot")
    add = options.add_argument
    add("--attention", nargs="+", choices=ATTENTION, default=BOTH, help="(standard flash)")
    add("--text", metavar="FILE", default=TEXT, help="what it learns from (the LICENSE)")
    add("--steps", type=number, default=200, help="(200)")
    add("--batch", type=number, metavar="B", default=8, help="pieces of text a step (8)")
    add("--seq-len", type=number, metavar="N", default=256, help="letters of a piece (256)")
    add("--layers", type=number, default=2, help="(2)")
    add("--heads", type=number, metavar="H", default=4, help="a divisor of --embd (4)")
    add("--embd", type=number, metavar="C", default=96, help="width of the model (96)")
    args, device, _ = lesson.begin(options)
    text = read(args.text, options)
    shape = {"N": args.seq_len, "n_layer": args.layers, "n_head": args.heads, "n_embd": args.embd}
    new = partial(Training, text, shape, tuple(dict.fromkeys(args.attention)), args.batch,
                  device=device, seed=args.seed)
    try:
        training = new()
    except ValueError as refusal:
        options.error(str(refusal))
    held = args.batch * args.heads * args.seq_len**2 * 4  # of the N x N matrices of a layer
    if "standard" in args.attention:
        need_room("a step with standard attention", held * (args.layers + 2), device)
    peaks = measure_steps(new())
    console.print(f"training on {len(text)} letters, {len(training.vocabulary)} different ones")
    train(training, args.steps)
    rows = compare(training, peaks)
    show_rows(rows)
    same = show_sample(training)
    if args.plot:
        plot(rows, Path(args.plot) / "loss.png")
    return lesson.finish(args, device, [("train", row) for row in rows]) or int(not same)


if __name__ == "__main__":
    cli.serve(main)

"""Phase 8's model, small enough for a laptop: it learns to write like a text, letter by letter.

    python mini_gpt.py                      train with standard and with flash attention, compare
    python mini_gpt.py --plot DIR           draw both loss curves as well
    python mini_gpt.py --checkpoint FILE    save there, and go on from there the next time

Both start from the same weights and read the same batches, so that their losses differ by rounding
alone. Ctrl-C stops after the step that runs and shows what there is by then.
"""

import contextlib
import pickle
import signal
import statistics
import zlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flash_attention import cli  # first: finds `common`
from cases import parser
from cross_reference import ATTENTION, CausalSelfAttention
from flash_decoding import KVCache
from common.device import choose, describe
from common.memory import measure_peak
from common.report import (
    console, mib, plotted, print_table, progress, whole_file, write_json,
)
from common.timing import time_call

import torch
import torch.nn.functional as F
from torch import nn

BOTH = ("standard", "flash")
TEXT = Path(__file__).resolve().parent.parent / "LICENSE"
# Adam divides a gradient by its size: with the usual eps of 1e-8, one that is 0 but for rounding,
# as of the bias of K, takes steps as long as any other, and different ones with each attention.
ADAMW = {"lr": 1e-3, "eps": 1e-6}
ALLOWED = 1e-3  # between the loss curves, in float32
SAVE_EVERY = 50  # steps


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

    N: the context, the most tokens that it reads at once. attention: a name of ATTENTION; the
    weights are drawn in the same order for both.
    """

    def __init__(self, vocabulary, N=256, n_layer=2, n_head=4, n_embd=96, attention="flash"):
        super().__init__()
        if attention not in ATTENTION:
            raise ValueError(f"attention must be one of {', '.join(ATTENTION)}, got {attention!r}")
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
        position = torch.arange(first, first + tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(position)  # [B, n, C]
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks)):
            x = block(x, cache)
        return (
            self.ln_f(x) @ self.wte.weight.T
        )  # [B, n, vocabulary], one table for both as in GPT-2

    def new_caches(self, batch):
        """Return an empty KVCache for each block."""
        heads, device = (self.n_head, self.N, self.n_embd // self.n_head), self.wte.weight.device
        return [KVCache(batch, *heads, device=device) for _ in self.blocks]


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
        P = torch.softmax(model(unread, caches)[:, -1], dim=-1).cpu()  # [B, vocabulary]
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
        self.config = {**shape, "attention": list(attention), "batch": batch, "seed": seed}
        self.config["text"] = zlib.crc32(text.encode())
        self.device, self.generator = torch.device(device), torch.Generator().manual_seed(seed)
        self.models, self.optimizers = {}, {}
        for name in attention:
            torch.manual_seed(seed)
            model = MiniGPT(len(self.vocabulary), **shape, attention=name).to(device)
            self.models[name] = model
            self.optimizers[name] = torch.optim.AdamW(model.parameters(), **ADAMW)
        self.losses, self.seconds = ({name: [] for name in attention} for _ in range(2))

    def encode(self, text):
        """Return the tokens of a text, [len(text)]."""
        return torch.tensor([self.vocabulary.index(character) for character in text])

    def decode(self, tokens):
        """Return the text of tokens [n]."""
        return "".join(self.vocabulary[token] for token in tokens.tolist())

    @property
    def steps(self):
        """How many steps are done."""
        return len(next(iter(self.losses.values())))

    def next_batch(self):
        """Return x and y [batch, N]: pieces of the text, and the same one character further on."""
        N, batch = self.config["N"], self.config["batch"]
        start = torch.randint(len(self.tokens) - N, (batch, 1), generator=self.generator)
        place = start + torch.arange(N)  # [batch, N]
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

    def save(self, path):
        """Write a checkpoint: all that the next step depends on, and what was measured so far."""
        state = {
            "config": self.config,
            "losses": self.losses,
            "seconds": self.seconds,
            "generator": self.generator.get_state(),
            "models": {name: x.state_dict() for name, x in self.models.items()},
            "optimizers": {name: x.state_dict() for name, x in self.optimizers.items()},
        }
        with whole_file(path) as part:
            torch.save(on_cpu(state), part)

    def load(self, path):
        """Go on from a checkpoint. Raises ValueError where it is none, or one of another run."""
        try:
            found = torch.load(path, weights_only=True)
            config = found["config"]
        except (RuntimeError, EOFError, pickle.UnpicklingError, LookupError, TypeError) as fault:
            raise ValueError(f"{path} is no checkpoint of a Training") from fault
        for key, value in self.config.items():
            if config.get(key) != value:
                raise ValueError(f"{path} is of a run with {key} {config.get(key)}, got {value}")
        self.losses, self.seconds = found["losses"], found["seconds"]
        self.generator.set_state(found["generator"])
        for name in self.models:
            self.models[name].load_state_dict(found["models"][name])
            self.optimizers[name].load_state_dict(found["optimizers"][name])


def on_cpu(state):
    """Return a state dict with its tensors on the CPU: such a checkpoint loads on any device."""
    if isinstance(state, dict):
        return {key: on_cpu(value) for key, value in state.items()}
    return state.cpu() if isinstance(state, torch.Tensor) else state


def train(training, steps, checkpoint=None, interrupted=()):
    """Take steps until `steps` are done or `interrupted` is not empty; return whether all are done.

    checkpoint: the file to save to, every SAVE_EVERY steps and at the end.
    """
    with progress("train", steps) as advance:
        for _ in range(training.steps):  # of an earlier run
            advance()
        while training.steps < steps:
            training.step()
            advance()
            if interrupted:
                break
            if checkpoint and training.steps % SAVE_EVERY == 0:
                training.save(checkpoint)
        if checkpoint:
            training.save(checkpoint)
    return training.steps >= steps


@contextlib.contextmanager
def noted_interrupt():
    """Yield a list that is empty until Ctrl-C, so that no step is torn. A second one interrupts."""
    pressed = []

    def note(number, frame):
        pressed.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


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
    rows = []
    shape = "x".join(str(training.config[key]) for key in ("batch", "N", "n_embd"))
    first = next(iter(training.losses.values()))
    for name, losses in training.losses.items():
        max_diff = max((abs(a - b) for a, b in zip(losses, first)), default=0.0)
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
    prompt = training.encode(training.decode(training.tokens).split()[0]).to(training.device)
    written, seconds = [], []
    for cached in (True, False):
        call = partial(generate, model, prompt[None], count, cached=cached)
        seconds.append(time_call(lambda c=call: written.append(c()), training.device))
    same = torch.equal(*written)
    console.print(
        f"\n{count} letters: {seconds[0]:.2f} s with the KV cache, {seconds[1]:.2f} s without, "
        f"{'the same text' if same else 'ANOTHER TEXT'}\n"
    )
    console.print(training.decode(written[0][0]), markup=False)
    return same


def plot(rows, path):
    """Draw the loss curves over each other, and below how far each is from the first."""
    with plotted(path, 2, 1, sharex=True, figsize=(7, 5), height_ratios=(3, 1)) as (above, below):
        for row, style in zip(rows, ("-", "--", ":")):
            above.plot(row.losses, style, label=row.name)
        for row in rows[1:]:
            below.plot([abs(a - b) for a, b in zip(row.losses, rows[0].losses)], color="grey")
        above.set(ylabel="loss", title=f"Training with each attention ({rows[0].shape})")
        below.set(ylabel="difference", xlabel="step", yscale="log")
        above.legend()


def main():
    number = cli.whole_number(1)
    options = parser(__doc__.splitlines()[0], "device", "seed", "json", "plot")
    add = options.add_argument
    add("--attention", nargs="+", choices=ATTENTION, default=BOTH,
        help="(standard flash)")
    add("--text", metavar="FILE", default=TEXT, help="what it learns from (the LICENSE)")
    add("--steps", type=number, default=200, help="(200)")
    add("--batch", type=number, metavar="B", default=8, help="pieces of text a step (8)")
    add("--seq-len", type=number, metavar="N", default=256, help="letters of a piece (256)")
    add("--layers", type=number, default=2, help="(2)")
    add("--heads", type=number, metavar="H", default=4, help="a divisor of --embd (4)")
    add("--embd", type=number, metavar="C", default=96, help="width of the model (96)")
    add("--checkpoint", metavar="FILE", help="go on from there if it exists, and save there")
    args = options.parse_args()
    device = choose(args.device)
    console.print(f"device: {describe(device)}")
    text = Path(args.text).read_text(encoding="utf-8", errors="replace")
    shape = {"N": args.seq_len, "n_layer": args.layers, "n_head": args.heads, "n_embd": args.embd}
    new = partial(Training, text, shape, dict.fromkeys(args.attention), args.batch, device=device,
                  seed=args.seed)
    try:
        training = new()
        if args.checkpoint and Path(args.checkpoint).exists():
            training.load(args.checkpoint)
    except ValueError as refusal:
        options.error(str(refusal))
    peaks = measure_steps(new())
    with noted_interrupt() as interrupted:
        console.print(f"training on {len(text)} letters, {len(training.vocabulary)} different ones")
        done = train(training, args.steps, args.checkpoint, interrupted)
    rows = compare(training, peaks)
    show_rows(rows)
    if args.json:
        write_json(args.json, device, [("train", row) for row in rows])
    if args.plot:
        plot(rows, Path(args.plot) / "loss.png")
    if not done:
        return 130  # as a shell says of a program that Ctrl-C ended
    same = show_sample(training)
    return 0 if same and all(row.passed for row in rows) else 1


if __name__ == "__main__":
    cli.serve(main)

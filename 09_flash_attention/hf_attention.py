"""Flash attention inside the models of Hugging Face's transformers, to train and to generate.

    python hf_attention.py      compare with eager and sdpa; measure the memory of a layer

It takes two functions, `tiled_mask` and `tiled_attention`. After `import hf_attention`, a model
of transformers can be built with attn_implementation="tiled_lesson", or switched to it by
model.set_attn_implementation("tiled_lesson"). The models that are compared here are small and have
random weights: nothing is downloaded.
"""

import sys
from dataclasses import dataclass
from functools import partial
from os.path import dirname, realpath
from types import FunctionType
from typing import Optional

sys.path.insert(0, dirname(realpath(__file__)))  # `python -I` leaves it out
from lab import lesson
from common import cli
from common.memory import measure_peak
from common.report import console, mib, print_table, track
from flash_backward import flash_attention
from flash_variants import with_sink
from lab.bench import need_room

import torch
from torch.overrides import TorchFunctionMode

try:
    import transformers
    from transformers import masking_utils as masks

    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):
        raise ImportError(f"found {transformers.__version__}")
except ImportError as missing:
    raise ImportError(f"it needs transformers 5.24 or newer ({missing}): pip install "
                      "transformers, which takes Python 3.10 or newer") from missing

NAME = "tiled_lesson"  # for a name with "flash" in it, transformers looks for a package


def tiled_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0,
               mask_function=masks.causal_mask_function, attention_mask=None, local_size=None,
               allow_is_causal_skip=True, device="cpu", **options):
    """Return the padding, [B, 1, 1, Nk]. Its attribute `sees` says the rest of the mask in numbers.

    sees: (causal, window, whether anything is padded). Nk is kv_length without the keys of a
    static cache that are not written yet. A mask that is more than causal or a window is returned
    whole, [B, 1, Nq, Nk], without `sees`. So is the mask of one query, which is small anyway and
    keeps its shape from step to step, as a compiled model needs.
    mask_function(b, h, q_idx, kv_idx): whether a query sees a key. attention_mask [B, Nk or more]:
    the padding, False where a token is not read. local_size: the window.
    """
    w = local_size or 0
    known = [(masks.causal_mask_function, True, None),
             (masks.bidirectional_mask_function, False, None),
             (masks.sliding_window_causal_mask_function(w), True, (w - 1, 0)),
             (masks.sliding_window_bidirectional_mask_function(w), False, (w, w))]
    sees = next((sees for function, *sees in known if alike(function, mask_function)), None)
    if sees is None or q_length == 1:
        return masks.sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            local_size, allow_is_causal_skip and q_length == 1, device=device, **options)
    causal, window = sees
    Nk = min(kv_length, int(q_offset) + q_length - kv_offset) if causal else kv_length
    padding = masks.sdpa_mask(  # of one query that sees all keys
        batch_size, 1, Nk, 0, kv_offset, masks.bidirectional_mask_function, attention_mask,
        allow_is_causal_skip=False, allow_is_bidirectional_skip=True, device=device)
    mask = torch.ones(1, 1, 1, Nk, dtype=torch.bool, device=device) if padding is None else padding
    mask.sees = causal, window, padding is not None
    return mask


def alike(f, g):
    """Return whether two functions are the same code over the same functions and whole numbers."""
    if isinstance(f, FunctionType) and isinstance(g, FunctionType):
        f, g = ((x.__code__, *(cell.cell_contents for cell in x.__closure__ or ()))
                for x in (f, g))
    if isinstance(f, tuple) and isinstance(g, tuple):
        return len(f) == len(g) and all(map(alike, f, g))
    return f is g or type(f) is type(g) is int and f == g


def tiled_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None,
                    sliding_window=None, softcap=None, is_causal=None, position_bias=None,
                    s_aux=None, **_):
    """Return O as transformers takes it, [B, Nq, H, dv], and None in place of the weights.

    query [B, H, Nq, d], key and value [B, Hkv, Nk or more, d or dv]. attention_mask: what
    `tiled_mask` returned, a whole mask [B, 1 or H, Nq, Nk], or None. softcap: Gemma 2's.
    position_bias [1, H, Nq, Nk]: T5's, learned. s_aux [H]: the sinks of gpt-oss, learned.
    Raises ValueError for a copy of tiled_mask's mask, which has lost `sees`.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = sliding_window and (sliding_window - 1, sliding_window - 1)  # it counts the query
    if attention_mask is not None:
        key, value = (x[:, :, : attention_mask.shape[-1]] for x in (key, value))
        if attention_mask.shape[-2] != query.shape[-2] and not hasattr(attention_mask, "sees"):
            raise ValueError("attention_mask must be [B, 1 or H, Nq, Nk] or tiled_mask's, no copy "
                             f"(use_reentrant makes one), got {tuple(attention_mask.shape)}")
        causal, window, masked = getattr(attention_mask, "sees", (False, None, True))
        attention_mask = attention_mask if masked else None
    mask, hidden = attention_mask, None
    if position_bias is not None:  # attn_mask can have a gradient, so the mask makes room for it
        mask, hidden = position_bias[..., : key.shape[-2]], attention_mask
    if hidden is not None:
        hidden = hidden.expand(*query.shape[:-1], key.shape[-2])  # a view [B, H, Nq, Nk]

    def score_mod(score, b, h, q_idx, kv_idx):
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if hidden is None:
            return score
        tile = hidden[b, h, q_idx, kv_idx]
        return score.masked_fill(~tile, -torch.inf) if tile.dtype == torch.bool else score + tile

    found = flash_attention(
        query, key, value, causal=causal, window=window, scale=scaling, attn_mask=mask,
        score_mod=None if softcap is hidden is None else score_mod, return_lse=s_aux is not None,
        dropout_p=dropout, seed=int(torch.randint(2**63 - 1, ())) if dropout else 0)
    O = found if s_aux is None else with_sink(*found, s_aux)
    return O.transpose(1, 2).contiguous(), None


transformers.AttentionInterface.register(NAME, tiled_attention)
transformers.AttentionMaskInterface.register(NAME, tiled_mask)


# The comparison

CAUSAL, ENCODER, BOTH = "AutoModelForCausalLM", "AutoModel", "AutoModelForSeq2SeqLM"
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
WINDOW = {"sliding_window": 5}
EXPERTS = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 2}
# Its name for AutoConfig: (its class, what its attention needs, sizes of its own).
MODELS = {
    "gpt2": (CAUSAL, "causal", {}),
    "llama": (CAUSAL, "fewer heads of K and V", {}),
    "mistral": (CAUSAL, "window", WINDOW),
    "qwen2_moe": (CAUSAL, "window, in the mask alone", {
        **EXPERTS, **WINDOW, "use_sliding_window": True, "max_window_layers": 9,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}),
    "gemma2": (CAUSAL, "softcap, window in a layer of two", {**WINDOW, "head_dim": 8}),
    "gpt_oss": (CAUSAL, "learned sinks, window in a layer of two", {
        **EXPERTS, **WINDOW, "head_dim": 8}),
    "deepseek_v3": (CAUSAL, "values smaller than keys", {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8, "v_head_dim": 6, "first_k_dense_replace": 2}),
    "llama4_text": (CAUSAL, "chunks: a mask of its own", {
        **EXPERTS, "head_dim": 8, "attention_chunk_size": 5, "intermediate_size_mlp": 32}),
    "bert": (ENCODER, "all keys", {}),
    "modernbert": (ENCODER, "window to both sides", {
        "local_attention": 6, "cls_token_id": 1, "sep_token_id": 2}),
    "vit": (ENCODER, "all keys, images", {"image_size": 32, "patch_size": 8}),
    "t5": (BOTH, "learned position bias, cross", {
        "d_kv": 8, "d_ff": 48, "num_decoder_layers": 2, "decoder_start_token_id": 0}),
    "bart": (BOTH, "cross", {
        "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}),
}
CACHES = ("dynamic", "static")
# float64 rounds by 1e-16, some thousand times for a logit; a key too many moves it by 0.1.
ALLOWED = 1e-10


class InFloat64(TorchFunctionMode):
    """Computes in float64 what a model asks for in float32, such as softmax, norms and angles."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = [torch.float64 if x is torch.float32 else x for x in args]
        named = {k: torch.float64 if x is torch.float32 else x for k, x in (kwargs or {}).items()}
        return func(*args, **named)


def small_model(name, seed=0, **sizes):
    """Return a model of MODELS in float64, in eval mode, all its parameters N(0, 0.3^2)."""
    kind, _, own = MODELS[name]
    config = transformers.AutoConfig.for_model(name, **{**SIZES, **own, **sizes})
    model = getattr(transformers, kind).from_config(
        config, attn_implementation="eager", experts_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return model.double().eval()


def small_inputs(name, seed=0, B=2, N=12, padding=4):
    """Return what the model reads, and which positions of its output count, an index of [B, N].

    The second of the B rows starts with padding.
    """
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        images = torch.randn(B, 3, 32, 32, generator=generator, dtype=torch.float64)
        return {"pixel_values": images}, ...
    tokens = partial(torch.randint, 3, SIZES["vocab_size"], generator=generator)
    read = torch.ones(B, N, dtype=torch.long)
    read[1, :padding] = 0
    inputs = {"input_ids": tokens((B, N)), "attention_mask": read}
    if MODELS[name][0] == BOTH:
        return {**inputs, "decoder_input_ids": tokens((B, N - 3))}, ...
    return inputs, read.bool()


def logits_and_gradients(model, inputs, counted=..., seed=0):
    """Return the outputs that count, and {parameter: gradient} of their sum with random weights."""
    model.zero_grad()
    logits = model(**inputs)[0][counted]
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    (logits * weights).sum().backward()
    gradients = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), gradients


def written(model, inputs, cache, steps=8):
    """Return the tokens [B, steps] that the model writes, and the logits of every step."""
    inputs = {k: x for k, x in inputs.items() if k != "decoder_input_ids"}
    found = model.generate(**inputs, max_new_tokens=steps, do_sample=False, output_logits=True,
                           cache_implementation=cache, return_dict_in_generate=True)
    return found.sequences[:, -steps:], torch.stack(found.logits)


@dataclass
class ModelRow:
    """Largest differences from eager attention in the same model, in float64.

    written: of the logits as it writes with each of CACHES, None where it can't; and same_tokens.
    """

    model: str
    needs: str
    attention: str
    logits: float
    parameters: int
    gradients: float
    written: Optional[float]
    same_tokens: Optional[str]
    passed: bool


def compare(name, seed=0):
    """Compare sdpa, where the model takes it, and tiled_attention with eager: ModelRows."""
    (kind, needs, _), (inputs, counted) = MODELS[name], small_inputs(name, seed)
    model, rows, expected = small_model(name, seed), [], None
    for attention in ("eager", "sdpa", NAME):
        try:
            model.set_attn_implementation(attention)
        except ValueError:  # sdpa has no softcap and no sinks
            continue
        with InFloat64():
            found = *logits_and_gradients(model, inputs, counted, seed), *(
                x for cache in CACHES if kind != ENCODER for x in written(model, inputs, cache))
        expected = expected or found
        logits, gradients, *texts = map(furthest, found, expected)
        same = sum((x == y).sum().item() for x, y in zip(found[2::2], expected[2::2]))
        held = all(x <= ALLOWED for x in (logits, gradients, *texts))
        rows.append(ModelRow(
            name, needs, attention, logits, len(expected[1]), gradients,
            max(texts[1::2]) if texts else None,
            f"{same} of {sum(x.numel() for x in found[2::2])}" if texts else None, held))
    return rows[1:]


def furthest(found, expected):
    """Return the largest difference of two tensors, or of two dictionaries of tensors."""
    if isinstance(expected, dict):
        if found.keys() != expected.keys():
            return torch.inf
        found, expected = (torch.cat([x[k].flatten() for k in expected]) for x in (found, expected))
    return (found - expected).abs().max().item()


@dataclass
class LayerRow:
    """Peak memory of an attention layer and its mask, in bytes; mask: the shape of the latter."""

    attention: str
    shape: str
    mask: str
    peak_bytes: int


@torch.no_grad()
def attention_layer(model, X, mask):
    """Return what the model's first attention layer makes of X [B, N, C] with mask()."""
    position = model.rotary_emb(X, torch.arange(X.shape[1])[None])
    return model.layers[0].self_attn(X, position_embeddings=position, attention_mask=mask())[0]


def measure_layer(N=4096, seed=0, B=2, H=8, C=64):
    """Measure Llama's layer in float32, one of B sequences padded by N/4 tokens: LayerRows."""
    device = torch.device("cpu")
    need_room("an attention layer with eager attention", 3 * B * H * N * N * 4, device)
    torch.manual_seed(seed)
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(
        "llama", **{**SIZES, "hidden_size": C, "num_attention_heads": H}))
    X, read = torch.randn(B, N, C), torch.ones(B, N, dtype=torch.long)
    read[0, : N // 4] = 0
    mask, rows = partial(masks.create_causal_mask, model.config, X, read, None), []
    for attention in ("eager", "sdpa", NAME):
        model.set_attn_implementation(attention)
        rows.append(LayerRow(
            attention, f"{B}x{N}x{C}, {H} heads", "x".join(map(str, mask().shape)),
            measure_peak(partial(attention_layer, model, X, mask), device).total))
    return rows


def show_models(rows):
    def number(x):
        return "-" if x is None else f"{x:.1e}"

    print_table(
        "Against eager attention in float64: largest differences", ["model", "what it needs",
        "attention", "logits", "parameters", "their gradients", "logits while writing",
        "same tokens", "result"],
        [(r.model, r.needs, r.attention, number(r.logits), r.parameters, number(r.gradients),
          number(r.written), r.same_tokens or "-", "pass" if r.passed else "FAIL") for r in rows],
        left=3)
    console.print(f"\nTwo sequences, one padded on the left; written with a dynamic and a static "
                  f"cache. Allowed: {ALLOWED:.0e}. sdpa has no softcap and no sinks.")


def show_layer(rows):
    print_table(
        f"Peak memory of one attention layer and its mask, {rows[0].shape}, float32, in MiB",
        ["attention", "mask", "peak"], [(r.attention, r.mask, mib(r.peak_bytes)) for r in rows])


def main():
    options = lesson.parser(__doc__, "seed", "json")
    options.set_defaults(device="cpu")  # float64, and eager's N x N matrices
    args, device, _ = lesson.begin(options)
    torch.set_num_threads(1)  # models this small take longer with more
    transformers.logging.set_verbosity_error()
    found = [row for name in track("models", MODELS) for row in compare(name, args.seed)]
    show_models(found)
    show_layer(layers := measure_layer(seed=args.seed))
    return lesson.finish(args, device, [*(("models", row) for row in found),
                                        *(("layer", row) for row in layers)])


if __name__ == "__main__":
    cli.serve(main)

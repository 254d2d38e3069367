"""Documents of very different lengths: several to a row, beside one to a row padded to one or four lengths.

    python benchmarks/packing.py [--pairs 7] [--documents 300]

Lengths are lognormal around a median of 16 tokens, cut at the window of 512, with three spreads. A small
decoder computes the loss and its gradient, 2,048 positions at a time. *Density* is the share of positions
that hold a token. The three ways take turns, each over all documents, and every ratio is formed
within a turn: tokens per second to padding to the window. Asked of packing: 0.95 of the gain in density. *By
operations* is the same ratio of multiplications, which is what a device that computes at its peak rate would
do: attention between documents of one row is computed and thrown away, as between a document and its padding.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxgoodput as jg
from jaxgoodput.engine.arithmetic import matrix_flops

MEDIAN, WINDOW, SPREADS = 16, 512, (0.5, 1.0, 1.5)
VOCAB, WIDTH, HEADS, LAYERS, TOKENS = 512, 128, 4, 2, 2048
GROUPS = 4
ASKED = 0.95


def documents_of(count, spread, seed=0):
    rng = np.random.default_rng(seed)
    sizes = np.clip(np.rint(MEDIAN * rng.lognormal(0.0, spread, count)), 2, WINDOW).astype(int)
    return [rng.integers(1, VOCAB, size) for size in sizes]


def init(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"tokens": (VOCAB, WIDTH), "positions": (WINDOW, WIDTH)}
    for layer in range(LAYERS):
        shapes |= {f"{layer}/{n}": (WIDTH, WIDTH) for n in ("query", "key", "value", "out")}
        shapes |= {f"{layer}/up": (WIDTH, 4 * WIDTH), f"{layer}/down": (4 * WIDTH, WIDTH)}
    return {
        k: jnp.asarray(rng.normal(size=s) / np.sqrt(s[0]), jnp.float32) for k, s in shapes.items()
    }


def loss(params, tokens, segments, positions, targets, weights):
    x = params["tokens"][tokens] + params["positions"][positions]
    for layer in range(LAYERS):
        heads = (
            (x @ params[f"{layer}/{n}"]).reshape(*x.shape[:2], HEADS, -1)
            for n in ("query", "key", "value")
        )
        mixed = jg.ring_attention(*heads, causal=True, segments=segments)
        x = x + mixed.reshape(x.shape) @ params[f"{layer}/out"]
        x = x + jnp.tanh(x @ params[f"{layer}/up"]) @ params[f"{layer}/down"]
    logits = x @ params["tokens"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return (losses * weights).sum()


GRADIENT = jax.jit(jax.value_and_grad(loss))


def batches(rows):
    """Micro-batches of at most TOKENS positions."""
    arrays = (rows.tokens, rows.segments, rows.positions, *rows.next_tokens())
    count = max(TOKENS // rows.tokens.shape[1], 1)
    for begin in range(0, len(rows.tokens), count):
        part = [x[begin : begin + count] for x in arrays]
        short = count - len(part[0])
        yield [np.pad(x, ((0, short), (0, 0))) for x in part]


def one_to_a_row(documents, length):
    each = [jg.lengths.packed([document], length=length) for document in documents]
    return jg.lengths.PackedRows(
        *(
            np.concatenate([getattr(one, field) for one in each])
            for field in ("tokens", "segments", "positions")
        )
    )


def ways(documents):
    """The micro-batches of each way."""
    sizes = [len(document) for document in documents]
    lengths = jg.lengths.best_lengths(sizes, GROUPS, multiple_of=8)
    groups = jg.lengths.split_by_length(sizes, lengths)
    grouped = [
        batch
        for length, group in zip(lengths, groups, strict=True)
        if len(group)
        for batch in batches(one_to_a_row([documents[i] for i in group], length))
    ]
    return {
        "padded": [*batches(one_to_a_row(documents, WINDOW))],
        "four lengths": grouped,
        "packed": [*batches(jg.lengths.packed(documents, length=WINDOW))],
    }


def run(params, found):
    """Compute all micro-batches; returns seconds, and the loss per token."""
    begun, total, weight = time.perf_counter(), 0.0, 0.0
    for batch in found:
        value, gradient = GRADIENT(params, *batch)
        jax.block_until_ready(gradient)
        total, weight = total + float(value), weight + float(batch[-1].sum())
    return time.perf_counter() - begun, total / weight


def flops(params, found):
    known = {}
    for batch in found:
        if batch[0].shape not in known:
            known[batch[0].shape] = matrix_flops(GRADIENT.trace(params, *batch).jaxpr.jaxpr)
    return sum(known[batch[0].shape] for batch in found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--documents", type=int, default=300)
    options = parser.parse_args()
    params = init()
    print(
        "| spread | way | density | tokens/s to padded | by operations | to the gain in density | loss |"
    )
    print("|---|---|---|---|---|---|---|")
    for spread in SPREADS:
        documents = documents_of(options.documents, spread)
        found = ways(documents)
        losses = {name: run(params, its)[1] for name, its in found.items()}  # compiles
        seconds = [
            {n: run(params, its)[0] for n, its in found.items()} for _ in range(options.pairs)
        ]
        operations = {name: flops(params, its) for name, its in found.items()}
        tokens = sum(map(len, documents))
        density = {n: tokens / sum(b[0].size for b in its) for n, its in found.items()}
        for name in found:
            ratios = np.array([turn["padded"] / turn[name] for turn in seconds])
            low, mid, high = np.percentile(ratios, [25, 50, 75])
            gain = density[name] / density["padded"]
            by_operations = operations["padded"] / operations[name]
            print(
                f"| {spread} | {name} | {density[name]:.3f} | {mid:.2f} ({low:.2f}-{high:.2f}) | "
                f"{by_operations:.2f} | {mid / gain:.2f}, by operations {by_operations / gain:.2f} | "
                f"{losses[name]:.6f} |",
                flush=True,
            )
    print(f"asked of packed rows: at least {ASKED} of the gain in density")


if __name__ == "__main__":
    main()

"""Numbers on the axes of drawn charts after training with several `text_weight`s, on one GPU.

    python tests/gpu/text_weight.py OUT.json [--weights 1,16] [--seconds 270] [--tiny]

The fine-tune of nbs/experiments/nano_text_weight.ipynb with more charts, steps and samples per
step. All runs are one stacked model (torch.func.vmap); those of a seed see the same charts, noise
and noise levels, only the weights of their cells differ. OUT.json holds, by step, weight and seed:
numbers read right, those of them that the autoencoder keeps, kinds and numbers of marks. --tiny:
a few steps on a CPU.
"""

import argparse
import functools
import json
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import torch
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from sciftune.core.presets import nano_folder
from sciftune.core.randomness import stream
from sciftune.data.cells import box_cells
from sciftune.extras.figures.charts import CHART_KINDS, ChartStyle, Pen, compose_chart
from sciftune.extras.figures.reader import following, load_reader
from sciftune.models.family import get_family
from sciftune.objectives.common.velocity import flow_loss, noised

SIDE = 128
NUMBERS = (5, 10, 20, 30, 40, 60, 80)
DROPOUT, SHIFT, RATE, DECAY, EMA = 0.1, 3, 5e-4, 0.01, 0.995
WARM_UP, CALIBRATED = 20, (60, 160)  # steps; the seconds between these two tell how many there are


class KeepingPen(Pen):
    """Draw as `Pen` does, and keep what `number` was called with."""

    def number(self, value: int, x: float, y: float, anchor: str):
        """Write a number in ink."""
        super().number(value, x, y, anchor)
        self.numbers = [*getattr(self, "numbers", ()), (value, (x, y, anchor))]


@functools.cache
def written(value: int, place: tuple) -> np.ndarray:
    """Return the share of ink in each pixel of a chart that holds this number alone."""
    pen = Pen(None, ChartStyle("", (), "#000000", ()), "#ffffff", SIDE)
    pen.number(value, *place)
    return 1 - np.asarray(pen.done().convert("L")) / 255


def box(value: int, place: tuple) -> list[int]:
    """Return left, top, right, bottom of a number in pixels."""
    down, right = (np.nonzero(written(value, place).sum(axis))[0] for axis in (1, 0))
    return [int(right[0]), int(down[0]), int(right[-1]) + 1, int(down[-1]) + 1]


def chart(series_and_number: tuple[int, int]) -> tuple:
    """Draw a chart: pixels (H,W,3), caption, numbers with places, covered parts of cells (h,w)."""
    pens, number = [], series_and_number[1]

    def pen(*given: object) -> KeepingPen:
        pens.append(KeepingPen(*given))
        return pens[0]

    kind = CHART_KINDS[number % len(CHART_KINDS)]
    rng = np.random.default_rng([*series_and_number, 3])
    image, facts = compose_chart(rng, kind, "chalk", SIDE, pen=pen)
    numbers = getattr(pens[0], "numbers", [])
    cells = box_cells([box(*n) for n in numbers], (SIDE, SIDE), SIDE, SIDE, 8) if numbers else None
    cells = np.zeros((SIDE // 8, SIDE // 8)) if cells is None else cells
    return np.asarray(image.convert("RGB")), facts["caption"], numbers, np.float32(cells)


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Return how alike two patches are."""
    a, b = a - a.mean(), b - b.mean()
    return (a * b).sum() / max(np.sqrt((a * a).sum() * (b * b).sum()), 1e-9)


def read_number(picture: np.ndarray, place: tuple) -> int | None:
    """Return the number whose drawing correlates best with what stands at a place."""
    left, top, right, bottom = box(80, place)
    grey = np.pad(picture @ np.array([0.299, 0.587, 0.114]), 2, mode="edge")
    best = (0.5, None)
    for value in NUMBERS:
        drawn = np.pad(written(value, place), 2)[top + 1 : bottom + 3, left + 1 : right + 3]
        for dy, dx in np.ndindex(3, 3):
            seen = grey[top + dy : bottom + 2 + dy, left + dx : right + 2 + dx]
            best = max(best, (correlation(seen, drawn), value), key=lambda x: x[0])
    return best[1]


def judged(pictures: np.ndarray, numbers: list, captions: list[str]) -> dict:
    """Read numbers, kinds and counts in pictures (N,H,W,3) of uint8."""
    torch.set_num_threads(1)
    judge = load_reader(nano_folder("qwenimage").parent / "reader")
    x = torch.from_numpy(pictures).permute(0, 3, 1, 2) / 127.5 - 1
    found = {name: float(v) for name, v in following(judge, x, captions).items()}
    read = [
        (value, read_number(picture, place))
        for picture, own in zip(pictures, numbers, strict=True)
        for value, place in own
    ]
    wrong = Counter(f"{a} as {b}" for a, b in read if a != b)
    right = [a == b for a, b in read]
    return found | dict(right=right, numbers=float(np.mean(right)), wrong=wrong.most_common(8))


class Charts:
    """Charts encoded: latents, captions and covered cells on the device."""

    def __init__(self, drawn: list, family: object, encoders: object, device: str):
        images, self.captions, self.numbers, cells = map(list, zip(*drawn, strict=True))
        self.images = np.stack(images)
        parts = []
        for first in range(0, len(images), 128):
            x = torch.from_numpy(self.images[first : first + 128]).permute(0, 3, 1, 2)
            parts.append(family.encode_images(encoders, (x / 127.5 - 1).to(device)))
        self.encoded = {k: torch.cat([p[k] for p in parts]).to(device) for k in parts[0]}
        self.cells = torch.from_numpy(np.stack(cells))[:, None].to(device)
        rows = family.encode_captions(encoders, [family.negative_caption, *self.captions], 64)
        self.text = {k: v.to(device) for k, v in family.collate(rows, 40).items()}


class Runs:
    """Models of all seeds and weights, stacked, and what they are trained with.

    Args:
        args: of the command line
        charts: of training
        family: of the models
        device: where they are
    """

    def __init__(self, args: argparse.Namespace, charts: Charts, family: object, device: str):
        self.charts, self.family, self.batch = charts, family, args.batch
        self.seeds = [int(s) for s in args.seeds.split(",")]
        self.weights = [float(w) for w in args.weights.split(",")]
        self.names = [(w, s) for s in self.seeds for w in self.weights]
        self.model = family.load_denoiser(nano_folder("qwenimage"), torch.float32, device)
        count = len(self.names)
        self.values = {
            name: p.detach()[None].repeat(count, *[1] * p.ndim).requires_grad_()
            for name, p in self.model.named_parameters()
        }
        self.ema = {name: p.detach().clone() for name, p in self.values.items()}
        self.optimizer = torch.optim.AdamW(self.values.values(), lr=RATE, weight_decay=DECAY)
        self.generators = [torch.Generator(device).manual_seed(1000 + s) for s in self.seeds]
        self.orders = [torch.empty(0, dtype=torch.long, device=device) for _ in self.seeds]
        self.stacked = torch.vmap(self.loss, in_dims=(0, 0, 0, 0, 0, 0, 0))

    def loss(self, values: dict, x0, noise, sigma, text, mask, cells) -> torch.Tensor:
        """Return the loss of one model: that of the objective `flow`."""

        def predict(x: torch.Tensor) -> torch.Tensor:
            net = Called(self.model, self.family)
            inputs = (x, sigma, dict(text=text, mask=mask))
            return functional_call(net, {f"net.{k}": v for k, v in values.items()}, inputs)

        return flow_loss(predict(noised(x0, noise, sigma)), x0, noise, cells=cells).mean()

    def drawn(self) -> tuple:
        """Return the next batch, the same for all weights of a seed."""
        parts, batch = [], self.batch
        for k, generator in enumerate(self.generators):
            draw = dict(generator=generator, device=generator.device)
            if len(self.orders[k]) < batch:
                self.orders[k] = torch.randperm(len(self.charts.captions), **draw)
            pick, self.orders[k] = self.orders[k].split((batch, len(self.orders[k]) - batch))
            encoded = {name: x[pick] for name, x in self.charts.encoded.items()}
            noise, posterior = (torch.randn(encoded["mean"].shape, **draw) for _ in range(2))
            u = (torch.randperm(batch, **draw) + torch.rand(batch, **draw)) / batch
            dropped = torch.rand(batch, **draw) < DROPOUT
            text = torch.where(dropped, 0, pick + 1)
            x0 = self.family.latents(encoded, posterior)
            parts.append((x0, noise, SHIFT * u / (1 + (SHIFT - 1) * u), text, pick))
        x0, noise, sigma, text, pick = map(torch.stack, zip(*parts, strict=True))
        weights = torch.tensor(self.weights, device=x0.device).view(1, -1, 1, 1, 1, 1)
        cells = 1 + (weights - 1) * self.charts.cells[pick][:, None]
        cells = (cells / cells.mean((-1, -2), keepdim=True)).flatten(0, 1)
        captions = [self.charts.text[k][text] for k in ("text", "mask")]
        every = [x0, noise, sigma, *captions]
        return (*(x.repeat_interleave(len(self.weights), 0) for x in every), cells)

    def step(self, rate: float, number: int) -> list[float]:
        """Train all models by one step, and return their losses."""
        with sdpa_kernel(SDPBackend.MATH):
            losses = self.stacked(self.values, *self.drawn())
            losses.sum().backward()
        trained = [p for p in self.values.values() if p.grad is not None]
        squares = [p.grad.flatten(1).square().sum(1) for p in trained]
        clipped = (1 / torch.stack(squares).sum(0).sqrt().clamp(min=1e-9)).clamp(max=1)
        for p in trained:
            p.grad.mul_(clipped.view(-1, *[1] * (p.ndim - 1)))
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        share = 1 - min(EMA, number / (number + 10))
        with torch.no_grad():
            torch._foreach_lerp_([*self.ema.values()], [*self.values.values()], share)
        return losses.tolist()


class Called(torch.nn.Module):
    """A denoiser, called through its family."""

    def __init__(self, net: torch.nn.Module, family: object):
        super().__init__()
        self.net, self.family = net, family

    def forward(self, x: torch.Tensor, sigma: torch.Tensor, conditioning: dict) -> torch.Tensor:
        """Predict the velocity."""
        return self.family.predict(self.net, x, sigma, conditioning)


@torch.no_grad()
def pictures(runs: Runs, k: int, test: Charts, vae: torch.nn.Module, steps: int) -> np.ndarray:
    """Draw the charts of a test with model k."""
    family, device = runs.family, test.cells.device
    base = nano_folder("qwenimage")
    net = family.load_denoiser(base, torch.float32, device).eval()
    net.load_state_dict({name: p[k] for name, p in runs.ema.items()}, strict=False)
    scheduler = family.scheduler(SIDE, SIDE, steps, family.sampling(base)["schedule"])
    shape, drawn = test.encoded["mean"].shape[1:], []
    for first in range(0, len(test.captions), 192):
        some = range(first, min(first + 192, len(test.captions)))
        noise = torch.stack([torch.randn(shape, generator=stream(0, "picture", i)) for i in some])
        captions = {name: x[[i + 1 for i in some]] for name, x in test.text.items()}
        none = {name: x[[0 for _ in some]] for name, x in test.text.items()}
        z = family.sample(net, noise.to(device), scheduler, captions, none, 3.0)
        drawn.append(family.decode(vae, z))
    return as_bytes(torch.cat(drawn))


def as_bytes(x: torch.Tensor) -> np.ndarray:
    """Return pictures (N,3,H,W) in [-1,1] as (N,H,W,3) of uint8."""
    return ((x.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy()


def rate(step: int, steps: int) -> float:
    """Return the learning rate: a short rise, then constant, and a fall over the last quarter."""
    return RATE * min(1, (step + 1) / WARM_UP, (steps - step) / (0.25 * steps))


def main():
    """Train, draw, read and write."""
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("out")
    ap.add_argument("--weights", default="1,16")
    ap.add_argument("--seeds", default="0,1,2")
    ap.add_argument("--seconds", type=float, default=270, help="of training")
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--charts", type=int, default=8192)
    ap.add_argument("--judged", type=int, default=384)
    ap.add_argument("--milestones", default="400,800,1600,3200,6400", help="steps to draw after")
    ap.add_argument("--tiny", action="store_true")
    args = ap.parse_args()
    if args.tiny:
        args.batch, args.charts, args.judged, args.milestones = 4, 32, 8, "3"
    device = "cpu" if args.tiny else "cuda"
    pool = ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn"))
    series = {3: args.charts, 17: args.judged}
    sets = [pool.map(chart, [(s, i) for i in range(n)], chunksize=16) for s, n in series.items()]
    torch.set_float32_matmul_precision("high")
    family = get_family("qwenimage")
    type(family).check_inputs = lambda *given: None  # it looks at values, which vmap has none of
    encoders = family.load_encoders(nano_folder("qwenimage"), device=device)
    train, test = (Charts(list(drawn), family, encoders, device) for drawn in sets)
    runs = Runs(args, train, family, device)
    with torch.no_grad():
        decoded = torch.cat(
            [family.decode(encoders.vae, x) for x in test.encoded["mean"].split(64)]
        )
    jobs = {
        name: pool.submit(judged, images, test.numbers, test.captions)
        for name, images in (("true", test.images), ("decoded", as_bytes(decoded)))
    }

    def draw(step: int):
        for k, (weight, seed) in enumerate(runs.names):
            made = pictures(runs, k, test, encoders.vae, 2 if args.tiny else 20)
            name = f"step {step}, weight {weight:g}, seed {seed}"
            jobs[name] = pool.submit(judged, made, test.numbers, test.captions)

    steps, marks, step, begun = 6 if args.tiny else 10**6, [], 0, time.perf_counter()
    while step < steps:
        losses = runs.step(rate(step, steps), step + 1)
        step += 1
        if step in CALIBRATED:
            marks.append(time.perf_counter())
        if step == CALIBRATED[1]:
            each = (marks[1] - marks[0]) / (CALIBRATED[1] - CALIBRATED[0])
            steps = max(step + 1, int((args.seconds - (marks[1] - begun)) / each) + step)
            print(f"{each:.4f} s for a step of {len(runs.names)} runs; {steps} steps", flush=True)
        if step in map(int, args.milestones.split(",")) or step == steps:
            draw(step)
            print(f"step {step}: losses {losses}", flush=True)
    scores = {name: job.result() for name, job in jobs.items()}
    kept = np.array(scores["decoded"].pop("right"))
    for name, score in scores.items():
        if "right" in score:
            score["of_kept"] = float(np.array(score.pop("right"))[kept].mean())
        print(f"{name:32}", {k: v for k, v in score.items() if k != "wrong"}, score["wrong"])
    with open(args.out, "w") as file:
        json.dump(dict(vars(args), steps=steps, numbers=len(kept), scores=scores), file)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Train the demo checkpoint from nothing, in three stages with a gate after each.

    python tools/train_demo.py --out demo/tiny-ovis2

``docs/demo.md`` tells what it learns, how, and how well.  Needs torch, transformers,
tokenizers, safetensors and Pillow; uses a GPU if there is one.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.reference.model import Ovis
from tests.reference.preprocess import PixelRule
from tools.demo_data.scenes import TASKS
from tools.demo_train.checkpoint import (
    build_tokenizer,
    model_config,
    preprocessor_config,
    write_checkpoint,
)
from tools.demo_train.examples import ExampleMaker, Layout, tile_count
from tools.demo_train.network import (
    Losses,
    Probes,
    Scaling,
    losses,
    recolour,
    start_values,
)
from tools.demo_train.pool import (
    ONE,
    HeldOut,
    Mix,
    Pool,
    example_bytes,
    heldout_batches,
)

BATCH_TILES = 320
WARMUP = 300
LOG_EVERY, EXAM_EVERY = 500, 4000
EXAM_SIZE = 200  # Held-out examples per task.
BETAS = (0.9, 0.97)
WEIGHT_DECAY = 0.02
# The visual vocabulary learns slower than the rest; at full rate it turns one-hot.
VOCABULARY_RATE = 0.4

TASK_SHARES = {
    "colour": 0.06,
    "shape": 0.07,
    "position": 0.05,
    "describe": 0.07,
    "two_images": 0.11,
    "detail": 0.12,
    "read": 0.34,
    "small_text": 0.18,
}
LAYOUT_SHARES: dict[Layout, float] = {
    ONE: 0.26,
    ((1, 1), (1, 1)): 0.07,
    ((1, 1), (2, 2)): 0.05,
    ((2, 2), (1, 1)): 0.05,
    ((1, 2),): 0.08,
    ((2, 1),): 0.04,
    ((2, 2),): 0.08,
    ((2, 3),): 0.04,
    ((3, 3),): 0.13,
    ((1, 6),): 0.10,
    ((1, 9),): 0.10,
}


@dataclass(frozen=True)
class Stage:
    """A part of the training.

    Attributes:
        name: For the log.
        steps: Optimiser steps.
        rate: Peak learning rate.
        final: Learning rate at the end, as a share of the peak (cosine in between).
        layouts: Shares of batches.
        eyes_only: Train the tower alone.
        extra: Weight of the extra losses at the start and at the end.
        gate: Least share of right answers per task or probe, on held-out examples.

    """

    name: str
    steps: int
    rate: float
    final: float
    layouts: Mapping[Layout, float]
    eyes_only: bool = False
    extra: tuple[float, float] = (1.0, 1.0)
    gate: Mapping[str, float] = field(default_factory=dict)


# Only pictures of one tile are trained by then.
SPEECH_GATE = {"colour": 0.8, "shape": 0.8, "read": 0.4}
STAGES = (
    Stage("eyes", 5000, 1.5e-3, 0.8, LAYOUT_SHARES, True, gate={"patch": 0.85}),
    Stage("speech", 4000, 1.2e-3, 1.0, {ONE: 1.0}, False, (0.5, 0.5), SPEECH_GATE),
    Stage(
        "all",
        56000,
        1.2e-3,
        0.01,
        LAYOUT_SHARES,
        False,
        (0.4, 0.05),
        dict.fromkeys(TASKS, 0.95),
    ),
)


@dataclass(frozen=True)
class Exam:
    """Held-out batches by layout: cut as usual, and as overviews only."""

    normal: list[HeldOut]
    overview: list[HeldOut]


class Trainer:
    """The model, its optimiser, and one recorded step for each layout.

    Args:
        device: Where to train.
        seed: Seed of start values and of all drawing.
        batch_tiles: Tiles in a batch, over all its examples.

    """

    def __init__(self, device: torch.device, seed: int, batch_tiles: int) -> None:
        torch.manual_seed(seed)
        self.device, self.batch_tiles = device, batch_tiles
        self.tokenizer = build_tokenizer()
        config = model_config(self.tokenizer)
        self.model = Ovis(config)
        start_values(self.model, seed)
        tower = config["visual_tokenizer_config"]["backbone_config"]
        stride = config["visual_tokenizer_config"]["hidden_stride"]
        hidden = config["hidden_size"]
        self.probes = Probes(tower["hidden_size"], stride, hidden)
        frame = ExampleMaker(self.tokenizer).frame()
        self._frame_ids = frame

    def to_device(self) -> None:
        """Move everything; apart from the constructor so that workers fork before."""
        self.model.to(self.device)
        self.probes.to(self.device)
        before, between = (
            torch.tensor(ids, device=self.device) for ids in self._frame_ids
        )
        self.frame = (before, between)
        rule = PixelRule.from_config(preprocessor_config())
        self.scaling = Scaling.of(rule, self.device)
        self.extra = torch.ones((), device=self.device)
        groups = self._parameter_groups()
        cuda = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            groups, betas=BETAS, fused=cuda, capturable=cuda
        )
        self._graph_memory = torch.cuda.graph_pool_handle() if cuda else None
        self._graphs: dict[tuple[Layout, bool], tuple[Callable[[], None], Losses]] = {}

    def _parameter_groups(self) -> list[dict]:
        groups: dict[tuple[float, float], list[Tensor]] = {}
        named = [*self.model.named_parameters(), *self.probes.named_parameters()]
        for name, parameter in named:
            slow = name in ("vte.weight", "visual_tokenizer.head.0.weight")
            decay = WEIGHT_DECAY if parameter.dim() > 1 and "vte" not in name else 0.0
            key = (VOCABULARY_RATE if slow else 1.0, decay)
            groups.setdefault(key, []).append(parameter)
        return [
            {
                "params": parameters,
                "weight_decay": decay,
                "lr": torch.tensor(0.0, device=self.device),
                "relative": relative,
            }
            for (relative, decay), parameters in groups.items()
        ]

    def losses(self, layout: Layout, batch: dict, eyes_only: bool) -> Losses:
        mixed = (
            torch.autocast("cuda", torch.bfloat16, cache_enabled=False)
            if self.device.type == "cuda"
            else nullcontext()
        )
        with mixed:
            return losses(
                self.model,
                self.probes,
                self.scaling,
                self.frame,
                layout,
                batch,
                eyes_only,
            )

    def _step(self, pool: Pool, layout: Layout, eyes_only: bool) -> Losses:
        size = max(1, self.batch_tiles // tile_count(layout))
        self.optimizer.zero_grad(set_to_none=True)
        batch = pool.batch(layout, size)
        task = batch["task"][:, 0]
        is_text = (task == TASKS.index("read")) | (task == TASKS.index("small_text"))
        batch["tiles"] = recolour(batch["tiles"], is_text)
        found = self.losses(layout, batch, eyes_only)
        total = found.text + self.extra * (found.eyes + found.words)
        total.backward()
        used = [
            p
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        torch.nn.utils.clip_grad_norm_(used, 1.0)
        self.optimizer.step()
        return found

    def step(self, pool: Pool, layout: Layout, eyes_only: bool) -> Losses:
        """One optimiser step; on a GPU the first call of a kind records it."""
        if self.device.type != "cuda":
            return self._step(pool, layout, eyes_only)
        key = (layout, eyes_only)
        if key not in self._graphs:
            with pool.lock:
                self._graphs[key] = self._record(pool, layout, eyes_only)
        replay, found = self._graphs[key]
        replay()
        return found

    def _record(
        self, pool: Pool, layout: Layout, eyes_only: bool
    ) -> tuple[Callable[[], None], Losses]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._step(pool, layout, eyes_only)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._graph_memory, capture_error_mode="thread_local"
        ):
            found = self._step(pool, layout, eyes_only)
        return graph.replay, found

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"].fill_(rate * group["relative"])

    @torch.no_grad()
    def evaluate(self, batches: list[HeldOut], eyes_only: bool) -> dict[str, float]:
        """Shares of right held-out answers per task, and of the probes.

        An answer counts if each token is the most likely one after the right tokens
        before it, which is what greedy decoding gives.
        """
        right, seen = dict.fromkeys(TASKS, 0.0), dict.fromkeys(TASKS, 0)
        watch: dict[str, list[float]] = {}
        for layout, batch in batches:
            found = self.losses(layout, batch, eyes_only)
            for key, value in found.watch.items():
                if layout == ONE:
                    watch.setdefault(key, []).append(float(value))
            for index, exact in zip(batch["task"][:, 0].tolist(), found.exact.tolist()):
                right[TASKS[index]] += exact
                seen[TASKS[index]] += 1
        scores = {key: sum(v) / len(v) for key, v in watch.items()}
        if not eyes_only:
            scores |= {t: right[t] / seen[t] for t in TASKS if seen[t]}
        return scores


def learning_rate(stage: Stage, step: int, done: float) -> float:
    """Linear warm-up, then a cosine from the peak to its final share."""
    warm = min(1.0, (step + 1) / WARMUP)
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return stage.rate * warm * (stage.final + (1 - stage.final) * cosine)


def show(scores: Mapping[str, float]) -> str:
    return " ".join(
        f"{key} {value:.0f}" if value > 2 else f"{key} {value:.3f}"
        for key, value in scores.items()
    )


def run_stage(
    trainer: Trainer,
    stage: Stage,
    pool: Pool,
    exam: Exam,
    deadline: float,
    out: Path,
) -> dict[str, float]:
    """Train one stage, write the checkpoint, return the held-out scores."""
    rng = torch.Generator().manual_seed(stage.steps)
    layouts, shares = list(stage.layouts), torch.tensor(list(stage.layouts.values()))
    pool.wait(dict.fromkeys(layouts, 1))
    order = torch.multinomial(shares, stage.steps, True, generator=rng).tolist()
    started = time.monotonic()
    for step, pick in enumerate(order):
        # Where time is short, the schedule follows the clock to its proper end.
        clock = (time.monotonic() - started) / (deadline - started)
        done = min(1.0, max(step / stage.steps, clock))
        trainer.set_rate(learning_rate(stage, step, done))
        trainer.extra.fill_(stage.extra[0] + (stage.extra[1] - stage.extra[0]) * done)
        found = trainer.step(pool, layouts[pick], stage.eyes_only)
        if (step + 1) % LOG_EVERY == 0 or step + 1 == stage.steps:
            running = {
                "eyes": found.eyes.item(),
                "words": found.words.item(),
                "text": found.text.item(),
                "exact": found.exact.float().mean().item(),
                **{key: value.item() for key, value in found.watch.items()},
            }
            seconds = time.monotonic() - started
            print(
                f"{stage.name} {step + 1}/{stage.steps} "
                f"{seconds / (step + 1) * 1e3:.2f} ms/step "
                f"pool {sum(pool.filled(key) for key in layouts)} {show(running)}",
                flush=True,
            )
        if (step + 1) % EXAM_EVERY == 0:
            scores = trainer.evaluate(exam.normal, stage.eyes_only)
            print(f"  held out: {show(scores)}", flush=True)
            write_checkpoint(out, trainer.model.state_dict(), trainer.tokenizer)
        if done == 1.0:
            print(f"  out of time at step {step + 1}", flush=True)
            break
    scores = trainer.evaluate(exam.normal, stage.eyes_only)
    print(f"{stage.name} done, held out: {show(scores)}", flush=True)
    if not stage.eyes_only:
        low = trainer.evaluate(exam.overview, False)
        print(f"{stage.name} max_partition 1: {show(low)}", flush=True)
    write_checkpoint(out, trainer.model.state_dict(), trainer.tokenizer)
    return scores


def check_gate(stage: Stage, scores: Mapping[str, float]) -> None:
    """Stop if a stage has not learned what the next one needs.

    Raises:
        SystemExit: The gate was not met.

    """
    short = {k: v for k, v in stage.gate.items() if scores.get(k, 0.0) < v}
    if short:
        raise SystemExit(f"stage {stage.name}: held-out scores below the gate {short}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--out", type=Path, default=Path("demo/tiny-ovis2"))
    parser.add_argument("--device", default=here)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=15, help="drawing processes")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all steps")
    parser.add_argument("--batch-tiles", type=int, default=BATCH_TILES)
    parser.add_argument(
        "--pool-gb", type=float, default=85.0, help="device memory for drawn examples"
    )
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="end in time, with fewer steps"
    )
    args = parser.parse_args()

    # The thread that moves new examples must not wait for the training loop's turn.
    sys.setswitchinterval(2e-4)
    started = time.monotonic()
    device = torch.device(args.device)
    trainer = Trainer(device, args.seed, args.batch_tiles)

    def capacity(layout: Layout) -> int:
        share = 0.3 if layout == ONE else 0.7 / (len(LAYOUT_SHARES) - 1)
        return int(args.pool_gb * 1e9 * share / example_bytes(layout))

    mix = Mix(tuple(LAYOUT_SHARES), TASK_SHARES)
    pool = Pool(trainer.tokenizer, mix, capacity, args.workers, args.seed)
    try:
        trainer.to_device()
        pool.start(device)
        size = max(4, round(EXAM_SIZE * min(1.0, args.scale)))
        exam = Exam(
            heldout_batches(trainer.tokenizer, size, device),
            heldout_batches(trainer.tokenizer, size, device, max_partition=1),
        )
        print(f"ready after {time.monotonic() - started:.0f} s", flush=True)
        for stage in STAGES:
            steps = max(1, round(stage.steps * args.scale))
            deadline = started + args.seconds
            scores = run_stage(
                trainer, replace(stage, steps=steps), pool, exam, deadline, args.out
            )
            # A shortened run is a check of the machinery, not of the model.
            if args.scale >= 1:
                check_gate(stage, scores)
    finally:
        pool.close()
    print(f"finished after {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()

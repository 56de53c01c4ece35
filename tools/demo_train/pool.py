# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Examples drawn by worker processes, kept on the training device.

Workers draw pictures exactly as the reference sees them and put chunks of examples
into shared memory; a thread moves the chunks into one growing pool per layout.
Training picks at random from what is there.
"""

import math
import mmap
import multiprocessing as mp
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_data.scenes import TASKS

from .examples import Example, ExampleMaker, Layout, shapes, tile_count

CHUNK_TILES = 160
SLOTS_PER_WORKER = 2
ONE: Layout = ((1, 1),)


def chunk_size(layout: Layout) -> int:
    return CHUNK_TILES // tile_count(layout)


def example_bytes(layout: Layout) -> int:
    """Bytes of one example."""
    return sum(
        math.prod(shape) * np.dtype(dtype).itemsize
        for shape, dtype in shapes(layout).values()
    )


def _views(memory: mmap.mmap, start: int, layout: Layout) -> dict[str, np.ndarray]:
    """Arrays of one chunk, one behind the other from byte ``start``."""
    views, size = {}, chunk_size(layout)
    for name, (shape, dtype) in shapes(layout).items():
        count = size * math.prod(shape)
        flat: np.ndarray = np.frombuffer(memory, dtype, count, start)
        views[name] = flat.reshape(size, *shape)
        start += flat.nbytes
    return views


@dataclass(frozen=True)
class Mix:
    """What workers draw.

    Attributes:
        layouts: Layouts to keep; examples of any other are dropped.
        tasks: Shares of the tasks.
        overview: Share of detailed pictures that are drawn with max_partition 1, so
            that an answer from the overview alone is trained, not refused.

    """

    layouts: tuple[Layout, ...]
    tasks: Mapping[str, float]
    overview: float = 0.1


class Drawer:
    """Draws endless chunks of examples, each of one layout."""

    def __init__(self, tokenizer: Tokenizer, mix: Mix, seed: int) -> None:
        self._maker = ExampleMaker(tokenizer)
        self._mix = mix
        self._random = Random(seed)
        self._waiting: dict[Layout, list[Example]] = {key: [] for key in mix.layouts}

    def chunk(self) -> tuple[Layout, list[Example]]:
        """Draw until one layout has enough examples for a chunk."""
        tasks, shares = list(self._mix.tasks), list(self._mix.tasks.values())
        while True:
            task = self._random.choices(tasks, shares)[0]
            detailed = task in ("detail", "small_text")
            limit = 1 if detailed and self._random.random() < self._mix.overview else 9
            seed = self._random.getrandbits(60)
            layout, example = self._maker.make(task, seed, False, limit)
            if layout not in self._waiting:
                continue
            waiting = self._waiting[layout]
            waiting.append(example)
            if len(waiting) == chunk_size(layout):
                self._waiting[layout] = []
                return layout, waiting


def _work(
    tokenizer_json: str,
    mix: Mix,
    seed: int,
    memory: mmap.mmap,
    flags: mmap.mmap,
    slots: range,
) -> None:
    torch.set_num_threads(1)
    parent = os.getppid()
    drawer = Drawer(Tokenizer.from_str(tokenizer_json), mix, seed)
    slot_bytes = len(memory) // len(flags)
    while True:
        for slot in slots:
            layout, chunk = drawer.chunk()
            while flags[slot] != 0:
                if os.getppid() != parent:
                    return
                time.sleep(0.002)
            for name, view in _views(memory, slot * slot_bytes, layout).items():
                for row, example in zip(view, chunk):
                    row[:] = example[name]
            flags[slot] = 1 + mix.layouts.index(layout)


class Pool:
    """Examples on the device, growing while training runs.

    Args:
        tokenizer: The checkpoint's tokeniser.
        mix: What to draw.
        capacity: Most examples to keep of a layout; later ones are dropped.
        workers: Number of processes.
        seed: Seed of all drawing.

    Create it before the first use of a GPU: the workers are forked.

    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        mix: Mix,
        capacity: Callable[[Layout], int],
        workers: int,
        seed: int,
    ) -> None:
        self._layouts = list(mix.layouts)
        largest = max(example_bytes(key) * chunk_size(key) for key in self._layouts)
        count = workers * SLOTS_PER_WORKER
        slot_bytes = -(-largest // 4096) * 4096
        self._memory = mmap.mmap(-1, count * slot_bytes)
        self._flags = mmap.mmap(-1, count)
        self._slot_bytes = slot_bytes
        self._capacity = {key: capacity(key) for key in self._layouts}
        self._filled = dict.fromkeys(self._layouts, 0)
        self._pools: dict[Layout, dict[str, Tensor]] = {}
        self._counts: dict[Layout, Tensor] = {}
        self.lock = threading.Lock()
        self._stop = threading.Event()
        context = mp.get_context("fork")
        self._workers = []
        for w in range(workers):
            slots = range(w * SLOTS_PER_WORKER, (w + 1) * SLOTS_PER_WORKER)
            arguments = (
                tokenizer.to_str(),
                mix,
                seed * 1000 + w,
                self._memory,
                self._flags,
                slots,
            )
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            self._workers.append(process)

    def start(self, device: torch.device) -> None:
        """Make room on the device and begin to move examples there."""
        for layout in self._layouts:
            n = self._capacity[layout]
            self._pools[layout] = {
                name: torch.empty(
                    (n, *shape), dtype=getattr(torch, dtype), device=device
                )
                for name, (shape, dtype) in shapes(layout).items()
            }
            self._counts[layout] = torch.zeros((), device=device)
        if device.type == "cuda":
            # Copies from memory the driver knows run beside the training.
            pages: np.ndarray = np.frombuffer(self._memory, np.uint8)
            torch.cuda.cudart().cudaHostRegister(pages.ctypes.data, pages.size, 0)
        threading.Thread(target=self._move, daemon=True).start()

    def _move(self) -> None:
        cuda = self._counts[self._layouts[0]].is_cuda
        # A stream of its own: on the training stream a copy would wait for every step
        # queued before it.
        with torch.cuda.stream(torch.cuda.Stream()) if cuda else nullcontext():
            self._move_until_stopped()

    def _move_until_stopped(self) -> None:
        while not self._stop.is_set():
            moved = False
            for slot in range(len(self._flags)):
                if self._flags[slot]:
                    with self.lock:
                        self._move_slot(slot)
                    moved = True
            if not moved:
                time.sleep(0.002)

    def _move_slot(self, slot: int) -> None:
        layout = self._layouts[self._flags[slot] - 1]
        views = _views(self._memory, slot * self._slot_bytes, layout)
        start = self._filled[layout]
        stop = min(start + chunk_size(layout), self._capacity[layout])
        for name, pool in self._pools[layout].items():
            part = torch.from_numpy(views[name][: stop - start])
            pool[start:stop].copy_(part, non_blocking=True)
        if self._counts[layout].is_cuda:
            torch.cuda.current_stream().synchronize()
        self._flags[slot] = 0
        self._filled[layout] = stop
        self._counts[layout].fill_(stop)

    def filled(self, layout: Layout) -> int:
        return self._filled[layout]

    def wait(self, wanted: Mapping[Layout, int]) -> None:
        """Wait until so many examples of each layout are there."""
        while any(self._filled[key] < n for key, n in wanted.items()):
            time.sleep(0.05)

    def batch(self, layout: Layout, size: int) -> dict[str, Tensor]:
        """A random batch; safe to record in a CUDA graph."""
        count = self._counts[layout]
        index = (torch.rand(size, device=count.device) * count).long()
        return {name: pool[index] for name, pool in self._pools[layout].items()}

    def close(self) -> None:
        """End the workers and the mover."""
        self._stop.set()
        for process in self._workers:
            process.terminate()
            process.join()


HeldOut = tuple[Layout, dict[str, Tensor]]


def heldout_batches(
    tokenizer: Tokenizer, count: int, device: torch.device, max_partition: int = 9
) -> list[HeldOut]:
    """Held-out examples of every task, grouped by layout.

    Args:
        tokenizer: The checkpoint's tokeniser.
        count: Examples per task.
        device: Where to put them.
        max_partition: Limit of the grid.

    """
    maker = ExampleMaker(tokenizer)
    groups: dict[Layout, list[Example]] = {}
    for task in TASKS:
        for seed in range(count):
            layout, example = maker.make(task, seed, True, max_partition)
            groups.setdefault(layout, []).append(example)
    return [
        (
            layout,
            {
                name: torch.from_numpy(np.stack([e[name] for e in group])).to(device)
                for name in group[0]
            },
        )
        for layout, group in groups.items()
    ]

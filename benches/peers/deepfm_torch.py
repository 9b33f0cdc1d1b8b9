"""DeepFM in PyTorch, one process: pyarrow in a prefetching thread, sparse gradients."""

import itertools
import queue
import threading
from collections.abc import Iterable, Iterator

import harness

harness.keep_large_blocks()

import torch  # noqa: E402 (after the malloc settings)
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import records  # noqa: E402

PREFETCHED_BATCHES = 4
MEMORY_BATCHES_MAX = 100


class DeepFm(nn.Module):
    """FM over the sparse fields plus an MLP over everything; the sum is the logit.

    One table holds each id's vector and, in its last column, its linear weight:
    one gather and one sparse update instead of two.
    """

    def __init__(self, hidden: list[int], dim: int):
        super().__init__()
        self.dim = dim
        self.table = nn.Embedding(harness.BINS, dim + 1, sparse=True)
        nn.init.normal_(self.table.weight, std=0.01)
        nn.init.zeros_(self.table.weight.data[:, dim])
        self.wide = nn.Linear(harness.DENSE_FIELDS, 1)
        layers: list[nn.Module] = []
        width = harness.DENSE_FIELDS + harness.SPARSE_FIELDS * dim
        for units in hidden:
            layers += [nn.Linear(width, units), nn.ReLU(inplace=True)]
            width = units
        self.deep = nn.Sequential(*layers, nn.Linear(width, 1))
        for layer in self.deep:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)
        nn.init.zeros_(self.wide.weight)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        rows = self.table(ids)
        linear = rows[..., self.dim].sum(1)
        flat = rows[..., : self.dim].flatten(1)
        vectors = flat.view(-1, harness.SPARSE_FIELDS, self.dim)
        pairs = 0.5 * (vectors.sum(1).square().sum(1) - flat.square().sum(1))
        deep = self.deep(torch.cat([dense, flat], 1)).squeeze(1)
        return deep + pairs + linear + self.wide(dense).squeeze(1)


class Trainer:
    """The model and its two optimizers: sparse rows, dense weights."""

    def __init__(self, hidden: list[int], dim: int):
        self.model = DeepFm(hidden, dim)
        settings = {
            "lr": harness.LEARNING_RATE,
            "initial_accumulator_value": harness.INITIAL_ACCUMULATOR,
        }
        dense = [*self.model.wide.parameters(), *self.model.deep.parameters()]
        self.optimizers = [
            torch.optim.Adagrad(self.model.table.parameters(), **settings),
            torch.optim.Adagrad(dense, fused=True, **settings),
        ]

    def step(self, label: Tensor, dense: Tensor, ids: Tensor) -> Tensor:
        loss = F.binary_cross_entropy_with_logits(self.model(dense, ids), label)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()


def prefetched(source: Iterable[records.Batch]) -> Iterator[tuple[Tensor, ...]]:
    """Runs the source in a thread, a few batches ahead.

    A thread is enough, since reading does not hold the GIL; a DataLoader with a
    worker process costs about as much.
    """
    ready: queue.Queue = queue.Queue(PREFETCHED_BATCHES)

    def read() -> None:
        try:
            for batch in source:
                ready.put(tuple(map(torch.from_numpy, batch)))
            ready.put(None)
        except Exception as error:  # the trainer must not wait for ever
            ready.put(error)

    threading.Thread(target=read, daemon=True).start()
    while (batch := ready.get()) is not None:
        if isinstance(batch, Exception):
            raise batch
        yield batch


def batches(parsed) -> Iterable[tuple[Tensor, ...]]:
    if parsed.format != "memory":
        return prefetched(
            records.batches(parsed.paths, parsed.format, parsed.batch, parsed.repeat)
        )
    kept = records.in_memory(parsed.paths, parsed.batch, MEMORY_BATCHES_MAX)
    tensors = [tuple(map(torch.from_numpy, batch)) for batch in kept]
    return itertools.cycle(tensors) if parsed.repeat else tensors


def main() -> None:
    parsed = harness.options("DeepFM in PyTorch")
    torch.manual_seed(parsed.seed)
    torch.set_num_threads(parsed.threads)
    torch.sparse.check_sparse_tensor_invariants.disable()
    trainer = Trainer(parsed.hidden, parsed.dim)
    clock = harness.Clock(parsed)
    losses = []
    for batch in batches(parsed):
        losses.append(trainer.step(*batch))
        if not clock.batch_done():
            break
    clock.report([loss.item() for loss in losses])


if __name__ == "__main__":
    main()

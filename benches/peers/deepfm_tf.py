"""DeepFM in TensorFlow, one process: tf.data, tf.function, sparse Adagrad on unique rows."""

import os

import harness

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
harness.keep_large_blocks()

import tensorflow as tf  # noqa: E402 (after the malloc and log settings)

import records  # noqa: E402

PREFETCHED_BATCHES = 4
MEMORY_BATCHES_MAX = 100
EPSILON = 1e-7

DENSE, SPARSE, BINS = harness.DENSE_FIELDS, harness.SPARSE_FIELDS, harness.BINS


class Adagrad(tf.Module):
    """Adagrad by TensorFlow's own update kernels, dense and sparse.

    The Keras optimizer deduplicates the rows of each table again and is a
    quarter slower on this model.
    """

    def __init__(self, variables: list[tf.Variable]):
        super().__init__()
        self.accumulators = {
            variable.ref(): tf.Variable(tf.fill(variable.shape, harness.INITIAL_ACCUMULATOR))
            for variable in variables
        }

    def dense(self, variable: tf.Variable, gradient: tf.Tensor) -> None:
        tf.raw_ops.ResourceApplyAdagradV2(
            var=variable.handle,
            accum=self.accumulators[variable.ref()].handle,
            lr=harness.LEARNING_RATE,
            epsilon=EPSILON,
            grad=gradient,
        )

    def sparse(self, variable: tf.Variable, gradient: tf.IndexedSlices) -> None:
        tf.raw_ops.ResourceSparseApplyAdagradV2(
            var=variable.handle,
            accum=self.accumulators[variable.ref()].handle,
            lr=harness.LEARNING_RATE,
            epsilon=EPSILON,
            grad=gradient.values,
            indices=gradient.indices,
        )


class DeepFm(tf.Module):
    """FM over the sparse fields plus an MLP over everything; the sum is the logit."""

    def __init__(self, hidden: list[int], dim: int, batch: int):
        super().__init__()
        self.dim, self.batch = dim, batch
        glorot = tf.keras.initializers.GlorotUniform()
        self.table = tf.Variable(tf.random.normal([BINS, dim], stddev=0.01))
        self.linear = tf.Variable(tf.zeros([BINS, 1]))
        self.wide = tf.Variable(tf.zeros([DENSE, 1]))
        self.layers = []
        width = DENSE + SPARSE * dim
        for units in [*hidden, 1]:
            self.layers.append((tf.Variable(glorot([width, units])), tf.Variable(tf.zeros([units]))))
            width = units
        self.weights = [self.wide, *(weight for layer in self.layers for weight in layer)]
        self.adagrad = Adagrad([self.table, self.linear, *self.weights])

    def logits(self, dense: tf.Tensor, vectors: tf.Tensor, linear: tf.Tensor) -> tf.Tensor:
        flat = tf.reshape(vectors, [self.batch, SPARSE * self.dim])
        total = tf.reduce_sum(vectors, 1)
        pairs = 0.5 * (tf.reduce_sum(total * total, 1) - tf.reduce_sum(flat * flat, 1))
        deep = tf.concat([dense, flat], 1)
        for weight, bias in self.layers[:-1]:
            deep = tf.nn.relu(tf.nn.bias_add(deep @ weight, bias))
        weight, bias = self.layers[-1]
        deep = tf.nn.bias_add(deep @ weight, bias) + dense @ self.wide
        return deep[:, 0] + pairs + tf.reduce_sum(linear, 1)

    def step(self, label: tf.Tensor, dense: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        # Both tables share the ids, so they are made unique once, and the
        # gradients of both come out summed per row.
        unique, position = tf.unique(tf.reshape(ids, [-1]))
        vectors, linear = tf.gather(self.table, unique), tf.gather(self.linear, unique)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([vectors, linear, *self.weights])
            logits = self.logits(
                dense,
                tf.reshape(tf.gather(vectors, position), [self.batch, SPARSE, self.dim]),
                tf.reshape(tf.gather(linear, position), [self.batch, SPARSE]),
            )
            loss = tf.reduce_mean(
                tf.nn.sigmoid_cross_entropy_with_logits(labels=label, logits=logits)
            )
        rows, scalars, *gradients = tape.gradient(loss, [vectors, linear, *self.weights])
        for variable, slices in ((self.table, rows), (self.linear, scalars)):
            summed = tf.math.unsorted_segment_sum(
                slices.values, slices.indices, tf.size(unique)
            )
            self.adagrad.sparse(variable, tf.IndexedSlices(summed, unique))
        for weight, gradient in zip(self.weights, gradients):
            self.adagrad.dense(weight, gradient)
        return loss


def parse_csv(lines: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """A batch of lines at once: the string kernels work on whole columns."""
    defaults = [[0.0]] * (1 + DENSE) + [[""]] * SPARSE
    columns = tf.io.decode_csv(lines, defaults, field_delim="\t", use_quote_delim=False)
    dense = tf.math.log1p(tf.maximum(tf.stack(columns[1 : 1 + DENSE], 1), 0.0))
    hashed = tf.strings.to_hash_bucket_fast(tf.stack(columns[1 + DENSE :], 1), BINS)
    # An offset per field, so that equal strings of two fields are different ids.
    offset = tf.range(SPARSE, dtype=tf.int64) * (BINS // SPARSE)
    ids = tf.cast((hashed + offset) % BINS, tf.int32)
    return columns[0], dense, ids


def batches(parsed) -> tf.data.Dataset:
    """(label [B], dense [B, 13], ids [B, 26]), a few batches ahead of the training."""
    batch = parsed.batch
    if parsed.format == "csv":
        data = tf.data.TextLineDataset(parsed.paths, buffer_size=4 << 20)
        data = data.repeat() if parsed.repeat else data
        data = data.batch(batch, drop_remainder=True)
        data = data.map(parse_csv, num_parallel_calls=parsed.threads)
    elif parsed.format == "parquet":
        data = tf.data.Dataset.from_generator(
            lambda: records.batches(parsed.paths, "parquet", batch, parsed.repeat),
            output_signature=(
                tf.TensorSpec([batch], tf.float32),
                tf.TensorSpec([batch, DENSE], tf.float32),
                tf.TensorSpec([batch, SPARSE], tf.int64),
            ),
        )
        data = data.map(lambda label, dense, ids: (label, dense, tf.cast(ids, tf.int32)))
    else:
        kept = records.in_memory(parsed.paths, batch, MEMORY_BATCHES_MAX)
        label, dense, ids = (tf.stack(arrays) for arrays in zip(*kept))
        data = tf.data.Dataset.from_tensor_slices((label, dense, tf.cast(ids, tf.int32)))
        data = data.repeat() if parsed.repeat else data
    settings = tf.data.Options()
    settings.deterministic = False
    return data.with_options(settings).prefetch(PREFETCHED_BATCHES)


def main() -> None:
    parsed = harness.options("DeepFM in TensorFlow")
    tf.config.threading.set_intra_op_parallelism_threads(parsed.threads)
    tf.config.threading.set_inter_op_parallelism_threads(parsed.threads)
    tf.random.set_seed(parsed.seed)
    model = DeepFm(parsed.hidden, parsed.dim, parsed.batch)
    data = batches(parsed)
    step = tf.function(model.step, input_signature=data.element_spec)
    clock = harness.Clock(parsed)
    losses = []
    for batch in data:
        losses.append(step(*batch))
        if not clock.batch_done():
            break
    clock.report([float(loss) for loss in losses])


if __name__ == "__main__":
    main()

"""What the optimizers of PyTorch and TensorFlow do to some weights, for the tests of ours.

    PYTHON optimizers.py ../../crates/ps/src/optimizer/references.json

Writes the file that `crates/ps/src/optimizer/tests/references.rs` reads: problems (what weights begin as, a gradient
for each step, what the learning rate is multiplied by at each step) and runs (the weights after each step of a
problem, the optimizer's slots after the last). All is computed in float64 and told with nine digits. What no framework has is
computed by its formula, written out below.
"""

import json
import os
import platform
import random
import sys

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy
import tensorflow
import torch

keras.backend.set_floatx("float64")

ADAM = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
ADAGRAD = {"learning_rate": 0.1, "initial_accumulator": 0.1, "epsilon": 1e-10}
MOMENTUM = {"learning_rate": 0.1, "momentum": 0.9}
# So large that it shows whether it is there and beside what, also where nothing else keeps a divisor from zero.
EPSILON = 1e-3
ADAM_EPSILON = {**ADAM, "epsilon": EPSILON}
ADAGRAD_EPSILON = {**ADAGRAD, "initial_accumulator": 0.0, "epsilon": EPSILON}

# Settings as job files have them; the optimizer of torch, its arguments, and where it keeps our slots, in our order.
TORCH = [
    ({"kind": "sgd", "learning_rate": 0.1}, "SGD", {"lr": 0.1}, []),
    ({"kind": "momentum", **MOMENTUM}, "SGD", {"lr": 0.1, "momentum": 0.9}, ["momentum_buffer"]),
    ({"kind": "nesterov", **MOMENTUM}, "SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}, ["momentum_buffer"]),
    ({"kind": "adagrad", **ADAGRAD}, "Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.1, "eps": 1e-10}, ["sum"]),
    ({"kind": "adagrad", **ADAGRAD_EPSILON}, "Adagrad", {"lr": 0.1, "eps": EPSILON}, ["sum"]),
    (
        {"kind": "adam", **ADAM},
        "Adam",
        {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8},
        ["exp_avg", "exp_avg_sq", "step"],
    ),
    (
        {"kind": "adam", **ADAM_EPSILON},
        "Adam",
        {"lr": 0.01, "betas": (0.9, 0.999), "eps": EPSILON},
        ["exp_avg", "exp_avg_sq", "step"],
    ),
    (
        # Moments so short that they shrink: what AMSGrad makes a difference for.
        {"kind": "amsgrad", **ADAM, "beta1": 0.5, "beta2": 0.6},
        "Adam",
        {"lr": 0.01, "betas": (0.5, 0.6), "eps": 1e-8, "amsgrad": True},
        ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"],
    ),
    (
        {"kind": "amsgrad", **ADAM_EPSILON, "beta1": 0.5, "beta2": 0.6},
        "Adam",
        {"lr": 0.01, "betas": (0.5, 0.6), "eps": EPSILON, "amsgrad": True},
        ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"],
    ),
    (
        {"kind": "adamw", **ADAM, "weight_decay": 0.1},
        "AdamW",
        {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1},
        ["exp_avg", "exp_avg_sq", "step"],
    ),
    (
        {"kind": "adamw", **ADAM_EPSILON, "weight_decay": 0.1},
        "AdamW",
        {"lr": 0.01, "betas": (0.9, 0.999), "eps": EPSILON, "weight_decay": 0.1},
        ["exp_avg", "exp_avg_sq", "step"],
    ),
    (
        {"kind": "rmsprop", "learning_rate": 0.01, "rho": 0.9, "epsilon": 1e-6},
        "RMSprop",
        {"lr": 0.01, "alpha": 0.9, "eps": 1e-6},
        ["square_avg"],
    ),
    (
        {"kind": "rmsprop", "learning_rate": 0.01, "rho": 0.9, "epsilon": EPSILON},
        "RMSprop",
        {"lr": 0.01, "alpha": 0.9, "eps": EPSILON},
        ["square_avg"],
    ),
]
# With so much of a weight added to its gradient, as tables may have it.
L2 = 0.03
DECAYING = {"sgd", "momentum", "adagrad", "adam", "amsgrad", "rmsprop"}
FTRL = [
    {"kind": "ftrl", "learning_rate": 0.1, "initial_accumulator": 0.1, "l1": l1, "l2": l2, "beta": beta}
    for l1, l2, beta in [(0.0, 0.0, 0.0), (0.02, 0.03, 0.0), (0.02, 0.03, 0.5)]
]


def drawn(seed: int, shape: list[int], steps: int, begins_at_zero: bool) -> dict:
    """A problem whose numbers are the same in float32: weights that never have a gradient, and steps without any."""
    dice = random.Random(seed)
    many = int(numpy.prod(shape))

    def number() -> float:
        return dice.randrange(-256, 257) / 256

    def gradient(step: int) -> list[float]:
        row = [0.0 if dice.randrange(4) == 0 else number() * dice.choice([0.015625, 1, 2]) for _ in range(many)]
        return [0.0] * many if step % 7 == 5 else row[:-1] + [0.0]

    return {
        "shape": shape,
        "weights": [0.0 if begins_at_zero else number() for _ in range(many)],
        "gradients": [gradient(step) for step in range(steps)],
        "rates": {
            "steady": [1.0] * steps,
            # Four steps to warm up, then down and, for a moment, up again.
            "varying": [(step + 1) / 4 if step < 4 else 1 / 2 ** (step // 4 % 4) for step in range(steps)],
        },
    }


FROM_ZEROS = "from zeros"
PROBLEMS = {
    "six steps of four weights": {
        "shape": [4],
        "weights": [1.0, -2.0, 0.3, 0.0],
        "gradients": [
            [0.5, -0.25, 0.0, 1e-3],
            [-1.0, 2.0, 1e-3, 0.0],
            [0.1, 0.1, 0.1, 1e-12],
            [0.0, 0.0, 0.0, 0.0],
            [1e-8, -3.0, 0.25, -0.5],
            [0.7, 1e-20, -0.01, 2.0],
        ],
        "rates": {"steady": [1.0] * 6, "varying": [0.5, 1.0, 1.0, 0.25, 0.25, 0.1]},
    },
    FROM_ZEROS: drawn(7, [2, 3], 12, True),
    "thirty steps of eleven weights": drawn(8, [11], 30, False),
}


def by_torch(name: str, arguments: dict, kept: list[str], problem: dict, rates: list[float]):
    weights = torch.tensor(problem["weights"], dtype=torch.float64).reshape(problem["shape"]).requires_grad_()
    optimizer = getattr(torch.optim, name)([weights], **arguments)
    for gradient, rate in zip(problem["gradients"], rates):
        optimizer.param_groups[0]["lr"] = arguments["lr"] * rate
        weights.grad = torch.tensor(gradient, dtype=torch.float64).reshape(problem["shape"])
        optimizer.step()
        yield weights.detach().flatten().tolist(), None
    state = optimizer.state[weights]
    yield None, [number for slot in kept for number in state[slot].flatten().tolist()]


def by_keras(spec: dict, problem: dict, rates: list[float]):
    weights = tensorflow.Variable(numpy.reshape(problem["weights"], problem["shape"]), dtype="float64")
    optimizer = keras.optimizers.Ftrl(
        learning_rate=spec["learning_rate"],
        initial_accumulator_value=spec["initial_accumulator"],
        l1_regularization_strength=spec["l1"],
        l2_regularization_strength=spec["l2"],
        beta=spec["beta"],
    )
    optimizer.build([weights])
    slots = {variable.path.rsplit("_", 1)[-1]: variable for variable in optimizer.variables}
    # Keras has made it a float32 on the way.
    slots["accumulator"].assign(numpy.full(problem["shape"], spec["initial_accumulator"]))
    for gradient, rate in zip(problem["gradients"], rates):
        optimizer.learning_rate = spec["learning_rate"] * rate
        gradient = tensorflow.constant(numpy.reshape(gradient, problem["shape"]), dtype="float64")
        optimizer.apply_gradients([(gradient, weights)])
        yield weights.numpy().flatten().tolist(), None
    sums = [number for slot in ("accumulator", "linear") for number in slots[slot].numpy().flatten().tolist()]
    # Ours remembers the last rate as well.
    yield None, [*sums, spec["learning_rate"] * rates[-1]]


def adagrad_by_row(spec: dict, problem: dict, rates: list[float]):
    weights, total = numpy.array(problem["weights"]), spec["initial_accumulator"]
    for gradient, rate in zip(numpy.array(problem["gradients"]), rates):
        total += (gradient**2).mean()
        weights -= spec["learning_rate"] * rate * gradient / (numpy.sqrt(total) + spec["epsilon"])
        yield weights.tolist(), None
    yield None, [total]


def ftrl_with_the_last_rate(spec: dict, problem: dict, rates: list[float]):
    """As published: what is summed up holds the rate that each step had, not the present one."""
    l1, l2, beta = spec["l1"], spec["l2"], spec["beta"]
    weights, before = numpy.array(problem["weights"]), None
    n, z = numpy.full_like(weights, spec["initial_accumulator"]), numpy.zeros_like(weights)
    for gradient, rate in zip(numpy.array(problem["gradients"]), rates):
        now = spec["learning_rate"] * rate
        old = (numpy.sqrt(n) + beta) / (before or now)
        n += gradient**2
        new = (numpy.sqrt(n) + beta) / now
        z += gradient - (new - old) * weights
        weights = -(z - numpy.clip(z, -l1, l1)) / (new + 2 * l2)
        before = now
        yield weights.tolist(), None
    yield None, [*n.tolist(), *z.tolist(), before]


def told(steps) -> dict:
    """Weights after every step, slots after the last."""

    def nine_digits(numbers: list[float]) -> list[float]:
        return [float(f"{number:.9g}") for number in numbers]

    steps = list(steps)
    weights = [nine_digits(weights) for weights, _ in steps[:-1]]
    return {"weights": weights, "slots": nine_digits(steps[-1][1])}


def runs():
    for name, problem in PROBLEMS.items():
        for how, rates in problem["rates"].items():
            common = {"problem": name, "rates": how}
            decaying = [
                ({"l2": L2}, spec, kind, {**arguments, "weight_decay": L2}, kept)
                for spec, kind, arguments, kept in TORCH
                if name == FROM_ZEROS and spec["kind"] in DECAYING
            ]
            for more, spec, kind, arguments, kept in [*[({}, *plain) for plain in TORCH], *decaying]:
                given = ", ".join(f"{key}={value}" for key, value in arguments.items())
                by = {"by": f"torch.optim.{kind}({given})", **common, "optimizer": spec, **more}
                yield {**by, **told(by_torch(kind, arguments, kept, problem, rates))}
            for settings in (ADAGRAD, ADAGRAD_EPSILON):
                spec = {"kind": "adagrad_row", **settings}
                steps = adagrad_by_row(spec, problem, rates)
                yield {"by": "numpy", **common, "optimizer": spec, **told(steps)}
            for spec in FTRL:
                # TensorFlow takes the present rate for the last one; see ftrl.rs.
                forgets = {"forgets_the_last_rate": True} if how == "varying" else {}
                by = {"by": "keras.optimizers.Ftrl", **common, "optimizer": spec, **forgets}
                yield {**by, **told(by_keras(spec, problem, rates))}
                if how == "varying":
                    steps = ftrl_with_the_last_rate(spec, problem, rates)
                    yield {"by": "numpy", **common, "optimizer": spec, **told(steps)}


def text(value, indent: str = "") -> str:
    """JSON with a line for each list of numbers and each object of plain values."""
    named = isinstance(value, dict)
    items = (value.values() if named else value) if isinstance(value, (dict, list)) else []
    if not any(isinstance(item, (dict, list)) for item in items):
        return json.dumps(value)
    inner = indent + " "
    if named:
        lines = [f"{inner}{json.dumps(key)}: {text(item, inner)}" for key, item in value.items()]
    else:
        lines = [inner + text(item, inner) for item in value]
    opening, closing = "{}" if named else "[]"
    return f"{opening}\n" + ",\n".join(lines) + f"\n{indent}{closing}"


def main() -> None:
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tensorflow": tensorflow.__version__,
        "keras": keras.__version__,
        "numpy": numpy.__version__,
    }
    written_by = "benches/peers/optimizers.py"
    document = {"written_by": written_by, "versions": versions, "problems": PROBLEMS, "runs": list(runs())}
    with open(sys.argv[1], "w") as file:
        file.write(text(document) + "\n")


if __name__ == "__main__":
    main()

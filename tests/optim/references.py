"""The rules of the optimizers in plain float64, one tensor at a time, and what drives both sides alike."""

import math

import torch


def make_weights(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def make_gradients(weights, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(w.shape, generator=generator).to(w.dtype) for w in weights] for _ in range(steps)]


def drive(optimizer, weights, gradients):
    """Steps once per entry of `gradients`; None leaves a parameter without one. Returns the last step's metrics."""
    metrics = None
    for step in gradients:
        for weight, gradient in zip(weights, step, strict=True):
            weight.grad = None if gradient is None else gradient.clone()
        metrics = optimizer.step()
    return metrics


def values(weights):
    return [weight.detach().clone() for weight in weights]


def all_equal(first, second):
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def adamw(weight, gradients, *, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    weight, first, second = weight.double(), 0.0, 0.0
    for step, gradient in enumerate(gradients, start=1):
        gradient = gradient.double()
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient**2
        scaled = (second / (1 - betas[1] ** step)).sqrt() + eps
        weight = weight * (1 - lr * weight_decay) - lr * (first / (1 - betas[0] ** step)) / scaled
    return weight


def lion(weight, gradients, *, lr, betas=(0.9, 0.99), weight_decay=0.0):
    weight, momentum = weight.double(), torch.zeros(weight.shape, dtype=torch.float64)
    for gradient in gradients:
        gradient = gradient.double()
        update = (betas[0] * momentum + (1 - betas[0]) * gradient).sign()
        weight = weight * (1 - lr * weight_decay) - lr * update
        momentum = betas[1] * momentum + (1 - betas[1]) * gradient
    return weight


def newton_schulz(matrix, coefficients=(3.4445, -4.7750, 2.0315), steps=5):
    """By the singular values, on which the iteration acts as a polynomial."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    a, b, c = coefficients
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ v


def muon(weight, gradients, *, lr, momentum=0.95, nesterov=True, weight_decay=0.1, match_rms=True):
    shape = weight.shape
    weight = weight.double().flatten(1)
    buffer = torch.zeros_like(weight)
    rows, columns = weight.shape
    ratio = 0.2 * math.sqrt(max(rows, columns)) if match_rms else math.sqrt(max(1, rows / columns))
    for gradient in gradients:
        gradient = gradient.double().flatten(1)
        buffer = momentum * buffer + (1 - momentum) * gradient
        ahead = momentum * buffer + (1 - momentum) * gradient if nesterov else buffer
        weight = weight * (1 - lr * weight_decay) - lr * ratio * newton_schulz(ahead)
    return weight.reshape(shape)

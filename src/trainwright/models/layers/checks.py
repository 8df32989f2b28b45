"""Refuses sizes that cannot make a model, before any weight is made, and inputs that no model of its size can take."""

from __future__ import annotations

from trainwright.errors import ConfigError, DataError


def check_counts(**counts: int) -> None:
    """Refuses a size below 1, by its name."""
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"{name} is {count}. Use a whole number of at least 1.", where="model")


def check_heads(hidden_size: int, num_heads: int) -> None:
    """Refuses a width that does not split evenly over the heads."""
    if hidden_size % num_heads:
        raise ConfigError(
            f"hidden_size {hidden_size} does not split into {num_heads} heads. "
            f"Use a multiple of {num_heads}, or another num_heads.",
            where="model",
        )


def check_dropouts(**dropouts: float) -> None:
    """Refuses what is no probability of dropping a value, by its name."""
    for name, dropout in dropouts.items():
        if not 0.0 <= dropout < 1.0:
            raise ConfigError(f"{name} is {dropout}. Use a probability from 0 up to, not including, 1.", where="model")


def check_length(length: int, max_positions: int) -> None:
    """Refuses rows of more tokens than there are positions."""
    if length > max_positions:
        raise DataError(
            f"The model has {max_positions} positions (max_positions) but the sequences hold "
            f"{length} tokens. Shorten the sequences or raise model.max_positions."
        )

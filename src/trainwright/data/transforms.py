"""Transforms for image datasets such as torchvision's: `transform: {type: timm, model_name: resnet10t}`.

Any other transform is named by its import path, `torchvision.transforms:ToTensor`; `Compose` receives a list of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from trainwright.config.problems import did_you_mean
from trainwright.errors import ConfigError


def timm_transform(model_name: str, *, is_training: bool = False, **options: Any) -> Callable[[Any], Any]:
    """Returns the transform that a timm model was trained with, which timm derives from the model's name.

    Size, interpolation, crop, mean and std come from the model's data config. `is_training` adds timm's augmentation;
    without it the transform is that of an evaluation. `options` are arguments of timm.data.create_transform, such as
    `input_size`, `auto_augment` and `re_prob`, and take precedence over the data config.
    """
    try:
        import timm.data
        from timm.models import get_pretrained_cfg
    except ImportError as error:
        raise ConfigError(
            f"A transform of type timm needs timm, which cannot be imported ({error}). Install it: pip "
            "install 'trainwright[timm]'"
        ) from error
    known = inspect.signature(timm.data.create_transform).parameters
    for name in options:
        if name not in known:
            raise ConfigError(
                f'timm.data.create_transform has no argument "{name}".{did_you_mean(name, known)} Known: '
                f"{', '.join(known)}."
            )
    config = get_pretrained_cfg(model_name)
    if config is None:
        advice = did_you_mean(model_name, timm.list_models())
        raise ConfigError(f'timm has no data config of "{model_name}".{advice} Use the name of a model of timm.')
    derived = timm.data.resolve_data_config(pretrained_cfg=config.to_dict())
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    transform: Callable[[Any], Any] = timm.data.create_transform(**{**derived, **given}, is_training=is_training)
    return transform

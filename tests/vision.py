"""Imports torchvision and timm for tests.

torchvision's wheels for CUDA have operators that the CPU build of torch cannot load, and its import fails without
their declarations. They are declared here; no test calls them.
"""

import importlib

import pytest
import torch

_DECLARATIONS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def import_torchvision():
    """Returns torchvision, or skips the test where it is not installed."""
    declare_operators()
    return pytest.importorskip("torchvision")


def import_timm():
    """Returns timm, which imports torchvision, or skips the test where one of them is not installed."""
    import_torchvision()
    return pytest.importorskip("timm")


def declare_operators():
    """Declares the operators that torchvision's import needs, unless torch has loaded them or it is not installed.

    transformers imports torchvision wherever it is installed.
    """
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return
    except RuntimeError:  # operator torchvision::nms does not exist
        _declare()


def _declare():
    library = torch.library.Library("torchvision", "FRAGMENT")
    for declaration in _DECLARATIONS:
        library.define(declaration)
    _LIBRARIES.append(library)  # its operators disappear with it


_LIBRARIES = []

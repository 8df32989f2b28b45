"""The typed, frozen settings of a run: `RunConfig`, its sections, and the values that are derived from them.

schema.py has RunConfig and the rules across sections, sections.py the sections, files.py reads and saves YAML,
python_files.py reads Python, overrides.py `a.b=1`, resolve.py derives mesh and batch sizes. Does not import torch.
"""

from trainwright.config.component import Component, ModelSection
from trainwright.config.frozen import Frozen
from trainwright.config.resolve import BatchPlan, known_data_ranks, micro_batch_alone, resolve_batch, resolve_mesh
from trainwright.config.schema import RunConfig
from trainwright.config.sections import (
    AnomaliesSection,
    CheckpointSection,
    DataSection,
    EvaluationSection,
    KeepBest,
    LogSection,
    MeshSection,
    OptimizerSection,
    PreemptionSection,
    ProcessSection,
    RuntimeSection,
    Section,
    TrainerSection,
    WatchdogSection,
)
from trainwright.config.yaml_text import Node, Origin

__all__ = [
    "AnomaliesSection",
    "BatchPlan",
    "CheckpointSection",
    "Component",
    "DataSection",
    "EvaluationSection",
    "Frozen",
    "KeepBest",
    "LogSection",
    "MeshSection",
    "ModelSection",
    "Node",
    "OptimizerSection",
    "Origin",
    "PreemptionSection",
    "ProcessSection",
    "RunConfig",
    "RuntimeSection",
    "Section",
    "TrainerSection",
    "WatchdogSection",
    "known_data_ranks",
    "micro_batch_alone",
    "resolve_batch",
    "resolve_mesh",
]

"""What a run is: `RunConfig`, its sections, and the values that are derived from them.

schema.py holds the whole, sections.py the parts, files.py reads and saves, overrides.py reads `a.b=1`,
checks.py holds the rules across sections, resolve.py derives mesh and batch sizes. No torch here.
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
    "TrainerSection",
    "WatchdogSection",
    "known_data_ranks",
    "micro_batch_alone",
    "resolve_batch",
    "resolve_mesh",
]

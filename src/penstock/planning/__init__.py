"""Which pipelines a run has and what they cost: templates, layouts, partitions, plans. Pure Python, no torch."""

from penstock.planning.layout import Layout, PipelineLayout
from penstock.planning.partition import Partition, partition, split_microbatches
from penstock.planning.simulate import LayoutSimulation, Reduction, simulate_layout
from penstock.planning.template import PipelineTemplate

__all__ = [
    "Layout",
    "LayoutSimulation",
    "Partition",
    "PipelineLayout",
    "PipelineTemplate",
    "Reduction",
    "partition",
    "simulate_layout",
    "split_microbatches",
]

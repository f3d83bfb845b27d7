"""Which pipelines a run has and what they cost: templates, layouts, partitions, plans. Importing it needs no torch."""

from penstock.layout.layout import Layout, PipelineLayout
from penstock.layout.partition import Partition, partition
from penstock.planning.sharing import split_microbatches
from penstock.simulation.simulate import LayoutSimulation, Reduction, simulate_layout

__all__ = [
    "Layout",
    "LayoutSimulation",
    "Partition",
    "PipelineLayout",
    "Reduction",
    "partition",
    "simulate_layout",
    "split_microbatches",
]

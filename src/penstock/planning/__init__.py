"""Which pipelines a run has and what they cost: templates, layouts, partitions, plans. Importing it needs no torch.

Its files, in the order in which they are best read:

- `cluster`: the devices; `profile`: what each unit costs on one, which `profiling` and `unit_cost` find out (`qlora`
  puts adapters on a packed base);
- `plan`: a job, and a plan for it with its predicted step; `memory`: what each rank holds; `context_parallel`: a job
  whose sequences are shared;
- `planner`: the best plans. The plans of small jobs are those of `exact`; others are those of `candidates`, which
  `search` finds by formula (`microbatches`: how many each pipeline gets);
- `auto`: the choice for a run; `fit`: a plan for each way to train; `report`: plans as tables.

`penstock.modeling.graph.plan` is something else: which calls and values a stage has.
"""

from penstock.layout.layout import Layout, PipelineLayout
from penstock.layout.partition import Partition, partition
from penstock.planning.microbatches import split_microbatches
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

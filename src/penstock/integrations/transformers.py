"""`PipelineTrainer` and its mixin, under the name that scripts import."""

from penstock.trainer.pipeline_trainer import PipelineTrainer as PipelineTrainer
from penstock.trainer.pipeline_trainer import PipelineTrainerMixin as PipelineTrainerMixin

"""TRL's trainers over pipeline stages, ready-made: the same arguments, and `parallelism`."""

from __future__ import annotations

from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer

from penstock.trainer.pipeline_trainer import PipelineTrainerMixin


class PipelineSFTTrainer(PipelineTrainerMixin, SFTTrainer):
    """TRL's SFTTrainer over pipeline stages."""


class PipelineDPOTrainer(PipelineTrainerMixin, DPOTrainer):
    """TRL's DPOTrainer over pipeline stages."""


class PipelineGRPOTrainer(PipelineTrainerMixin, GRPOTrainer):
    """TRL's GRPOTrainer over pipeline stages. Completions are generated over the stages."""


class PipelineRewardTrainer(PipelineTrainerMixin, RewardTrainer):
    """TRL's RewardTrainer over pipeline stages."""


class PipelineKTOTrainer(PipelineTrainerMixin, KTOTrainer):
    """TRL's KTOTrainer over pipeline stages."""

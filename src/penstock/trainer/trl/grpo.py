"""TRL's GRPOTrainer over pipelines: it generates over the stages, scores the completions, and trains on them."""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any
from unittest import mock

import torch
from transformers import TrainingArguments, set_seed

from penstock.data.microbatch import split_batch
from penstock.random_state import all_restored, generators_in_use
from penstock.runtime.comm.exchange import Ranks
from penstock.runtime.comm.rollcall import Call
from penstock.trainer.own_loss import OwnLoss, Term
from penstock.trainer.trainer_adapter import not_over_pipelines

logger = logging.getLogger(__name__)

# Losses that are a mean over the tokens of the batch, and those that are a sum divided by a number that all know.
OVER_TOKENS = ("bnpo",)
SUMS = ("cispo", "dapo", "vespo")
# What may not be set, by the name of the argument, and what to do instead.
REFUSED_IF_SET = {
    "use_vllm": "vLLM would be given the weights of one stage. Leave it out: completions are generated over the stages",
    "use_transformers_continuous_batching": "leave it out",
    "cast_lm_head_to_fp32": "load the whole model in float32",
    "entropy_coef": "leave it out: the mean of the entropy is another one than the loss's",
    "use_adaptive_entropy": "leave it out: the mean of the entropy is another one than the loss's",
}
# The same of what the trainer is given. It keeps `environment_factory` under another name.
REFUSED_IF_GIVEN = {
    "rollout_func": "every rank of a pipeline would call it: leave it out",
    "environment_factory": "every rank of a pipeline would run the environments: leave it out",
    "tools": "every rank of a pipeline would call them: leave them out",
}
ATTRIBUTES = {"environment_factory": "environment_factories"}


class GRPO(OwnLoss):
    """The samples are completions. Each is generated on all ranks of a pipeline alike, and scored on its first rank."""

    trainer_class = "trl.GRPOTrainer"

    # -- checks ----------------------------------------------------------------------------------------------------

    def refuse_arguments(self, args: TrainingArguments) -> None:
        super().refuse_arguments(args)
        for owner, refused in ((args, REFUSED_IF_SET), (self.trainer, REFUSED_IF_GIVEN)):
            for name, instead in refused.items():
                if getattr(owner, ATTRIBUTES.get(name, name), None):
                    raise not_over_pipelines(name, instead)
        if args.top_entropy_quantile < 1:
            raise not_over_pipelines("top_entropy_quantile", "it compares the tokens of the whole batch: leave it out")
        if self.trainer._is_vlm:
            raise not_over_pipelines("GRPOTrainer with a processor of images", "give a tokenizer")

    # -- forming ---------------------------------------------------------------------------------------------------

    @contextmanager
    def while_made(self) -> Iterator[None]:
        module = self._module
        with super().while_made(), mock.patch.object(module, "set_seed", self._set_seed):
            yield

    @property
    def _module(self) -> Any:
        """TRL's module of the trainer."""
        return inspect.getmodule(self.owner)

    def _set_seed(self, seed: int, device_specific: bool = False) -> None:
        """In place of accelerate's: ranks of a pipeline have the same random numbers."""
        set_seed(seed + (self.trainer.accelerator.process_index if device_specific else 0))

    def begin(self) -> None:
        super().begin()
        self._count_pipelines()
        trainer = self.trainer
        trainer._generate_and_score_completions = partial(
            self._generated_and_scored, trainer._generate_and_score_completions
        )
        trainer._calculate_rewards = partial(self._rewards, trainer._calculate_rewards)

    def _count_pipelines(self) -> None:
        """Let a generation have the samples of as many steps as asked for: GRPOConfig has counted each rank, as if it
        had samples of its own, and the order of the data depends on generation_batch_size. It has computed this or
        steps_per_generation, whichever was not given, so it is not known any more which one was. The
        user's arguments, of which another trainer may be made, stay as they are."""
        args = self.trainer.args = copy.copy(self.trainer.args)
        pipelines = len(self.engine.layout.pipelines)
        counted = args.generation_batch_size
        args.generation_batch_size = args.per_device_train_batch_size * args.steps_per_generation * pipelines
        if counted != args.generation_batch_size and self.engine.rank == 0:
            logger.warning(
                "generation_batch_size is %d (per_device_train_batch_size times steps_per_generation=%d times %d "
                "pipelines), and not %d, for which GRPOConfig counted ranks. If you gave generation_batch_size, give "
                "steps_per_generation in its place",
                args.generation_batch_size, args.steps_per_generation, pipelines, counted,
            )  # fmt: skip
        evaluated = args.per_device_eval_batch_size * pipelines
        evaluates = args.eval_strategy != "no"
        for name, size, group in (
            ("generation_batch_size", args.generation_batch_size, self.trainer.num_generations),
            ("per_device_eval_batch_size", evaluated, self.trainer.num_generations_eval if evaluates else 1),
        ):
            if size % group:
                raise not_over_pipelines(
                    f"{name} of {size} over {pipelines} pipelines",
                    f"it must be a multiple of {group} generations",
                )

    # -- completions -----------------------------------------------------------------------------------------------

    def _generated_and_scored(self, own: Any, inputs: Any) -> Any:
        """The trainer's own method, in which a pipeline is one process."""
        module, accelerator = self._module, self.trainer.accelerator
        with ExitStack() as patches:
            patches.enter_context(mock.patch.object(module, "gather", accelerator.gather))
            gathering = partial(self._gathered_objects, module.gather_object)
            patches.enter_context(mock.patch.object(module, "gather_object", gathering))
            return own(inputs)

    def _gathered_objects(self, own: Any, values: list[Any]) -> list[Any]:
        by_rank = own([values])
        return list(chain.from_iterable(by_rank[rank] for rank in self.trainer.accelerator.first_ranks))

    def _rewards(self, own: Any, *given: Any) -> torch.Tensor:
        """The trainer's own method: what the reward functions give, for the completions of all pipelines. They are
        called on the first rank of each pipeline alone, and leave the random numbers as they were. What they log, the
        trainer averages over processes: all ranks of a pipeline have it."""
        engine, module, trainer = self.engine, self._module, self.trainer
        firsts = trainer.accelerator.first_ranks

        def of_this_pipeline() -> tuple[list[list[float | None]], dict[str, list[float]]]:
            if engine.rank not in firsts:
                return [], {}
            with mock.patch.object(module, "gather", lambda rewards: rewards), all_restored(generators_in_use()):
                rewards: list[list[float]] = own(*given).tolist()
            logged = {name: [float(value) for value in values] for name, values in trainer._pending_metrics.items()}
            return [[None if math.isnan(reward) else reward for reward in row] for row in rewards], logged

        with engine.together(Call.SHARE):
            ranks = Ranks(engine.context.groups.world_control, engine.board.guard)
            by_rank = ranks.together("scoring completions", of_this_pipeline)
        scored = [by_rank[rank] for rank in firsts]
        trainer._pending_metrics.update(scored[trainer.accelerator.process_index][1])
        rewards_of_all = chain.from_iterable(rewards for rewards, _ in scored)
        return torch.tensor(
            [[math.nan if reward is None else reward for reward in row] for row in rewards_of_all], device=engine.device
        )

    # -- a training step -------------------------------------------------------------------------------------------

    def microbatches(self, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        size = len(batch["completion_ids"])
        return split_batch(batch, size, self.sizes(size))

    def terms(self) -> Sequence[Term]:
        kind, trainer = self.trainer.loss_type, self.trainer
        if kind in SUMS:
            # The routers' loss is no sum over microbatches, but their mean, as it is over an accumulation.
            weight = getattr(trainer, "router_aux_loss_coef", 0.0) / len(self.sizes(_completions(self._whole)))
            return [Term(None, {"router_aux_loss_coef": weight})]
        return [Term(_tokens if kind in OVER_TOKENS else _completions)]


def _completions(batch: Mapping[str, Any]) -> int:
    return len(batch["completion_ids"])


def _tokens(batch: Mapping[str, Any]) -> int:
    mask = batch["completion_mask"]
    return int((mask * batch["tool_mask"] if "tool_mask" in batch else mask).sum())

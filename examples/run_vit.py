"""Train a vision transformer over pipelines that may differ in depth, save it, and reload it with plain transformers.

torchrun --standalone --nproc-per-node 4 run_vit.py --pipelines 1x2,3x6
"""

import torch
from transformers import ViTConfig, ViTForImageClassification

from common import IMAGE_SIZE, finish, images, make_plugin, parse_options, train
from penstock import Booster


def main() -> None:
    options = parse_options("Train a vision transformer over pipelines that may differ in depth.")
    if options.model:
        config = ViTConfig.from_pretrained(options.model)
        dataset = images(options.dataset, config.image_size)
        model = ViTForImageClassification.from_pretrained(
            options.model, num_labels=dataset.num_labels, ignore_mismatched_sizes=True
        )
    else:
        dataset = images(options.dataset, IMAGE_SIZE)
        model = ViTForImageClassification(
            ViTConfig(
                image_size=IMAGE_SIZE,
                patch_size=8,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_labels=dataset.num_labels,
            )
        )

    plugin = make_plugin(model, options)
    dataloader = plugin.prepare_dataloader(dataset, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, options.steps)

    booster = Booster(plugin=plugin)
    model, optimizer, _, dataloader, lr_scheduler = booster.boost(model, optimizer, None, dataloader, lr_scheduler)
    plugin.describe(plot=options.plot)
    losses = train(booster, model, optimizer, dataloader, lr_scheduler, options, options.output / "vit")
    finish(booster, model, losses, options.output / "vit")


if __name__ == "__main__":
    main()

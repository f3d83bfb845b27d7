"""What the ranks of the benchmark's tests run."""

from kinds.measure import Clock
from kinds.options import World, read_options
from kinds.trainer import build_contestant, build_optimizer, choose_devices, make_batch, train_step

TINY = "--vocab_size 61 --block_size 16 --n_layer 4 --n_head 2 --n_embd 32"


def losses_of(arguments: str, num_steps: int = 3) -> list[float]:
    """This rank's parts of the global losses of some training steps."""
    import torch.distributed as dist

    world = World(dist.get_world_size(), dist.get_world_size(), dist.get_rank(), dist.get_rank(), "cpu", 4)
    options = read_options(arguments.split(), world)
    devices = choose_devices(options, world)
    contestant = build_contestant(options, devices)
    optimizer = build_optimizer(options, contestant)
    clock = Clock(devices)
    try:
        return [
            train_step(contestant, optimizer, make_batch(options, number), clock).loss for number in range(num_steps)
        ]
    finally:
        contestant.close()

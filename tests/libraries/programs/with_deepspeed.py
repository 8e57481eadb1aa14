"""Trains with DeepSpeed on the CPU. The program's own argument is the stage of ZeRO."""

from __future__ import annotations

import deepspeed
import digits
import evidence
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy


def main() -> None:
    options = evidence.options()
    stage = int(options.rest[0])
    deepspeed.init_distributed(dist_backend=options.backend)
    network = digits.network()
    engine, _optimizer, loader, _schedule = deepspeed.initialize(
        model=network,
        optimizer=torch.optim.Adam(network.parameters(), lr=0.01),
        training_data=digits.dataset(),
        config={
            "train_micro_batch_size_per_gpu": 16,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 4096},
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
        },
    )
    losses = []
    for images, labels in loader:
        loss = cross_entropy(engine(images), labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    evidence.write(options.folder, losses, engine, engine.data_parallel_group)
    dist.barrier()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()

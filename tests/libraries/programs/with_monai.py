"""Trains a small U-Net with MONAI's engines, to find circles in made images."""

from __future__ import annotations

import evidence
import numpy
import torch
import torch.distributed as dist
from monai.data import CacheDataset, DataLoader, DistributedSampler, create_test_image_2d
from monai.engines import SupervisedEvaluator, SupervisedTrainer
from monai.handlers import MeanDice, from_engine
from monai.inferers import SimpleInferer
from monai.losses import DiceCELoss
from monai.metrics import CumulativeAverage, DiceMetric
from monai.networks.nets import UNet
from monai.transforms import Activationsd, AsDiscreted, Compose
from monai.utils import evenly_divisible_all_gather, string_list_all_gather
from torch.nn.parallel import DistributedDataParallel

IMAGES = 31  # no multiple of the ranks
CPU = torch.device("cpu")


def dataset() -> CacheDataset:
    made = []
    random = numpy.random.RandomState(0)
    for _ in range(IMAGES):
        image, circles = create_test_image_2d(
            32, 32, num_objs=3, rad_max=8, rad_min=3, channel_dim=0, random_state=random
        )
        made.append({
            "image": torch.tensor(image, dtype=torch.float32),
            "label": torch.tensor(circles > 0, dtype=torch.float32),
        })  # fmt: skip
    return CacheDataset(made, Compose([]), progress=False)


def main() -> None:
    options = evidence.options()
    dist.init_process_group(options.backend or "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        UNet(spatial_dims=2, in_channels=1, out_channels=1, channels=(8, 16), strides=(2,))
    )
    data = dataset()
    sampler = DistributedSampler(data, even_divisible=True, shuffle=True)
    losses: list[float] = []
    average = CumulativeAverage()
    trainer = SupervisedTrainer(
        device=CPU, max_epochs=3, train_data_loader=DataLoader(data, batch_size=4, sampler=sampler),
        network=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        loss_function=DiceCELoss(sigmoid=True), inferer=SimpleInferer(), decollate=False,
    )  # fmt: skip

    def shuffle() -> None:
        sampler.set_epoch(trainer.state.epoch)

    def record() -> None:
        losses.append(trainer.state.output["loss"].item())
        average.append(losses[-1])

    trainer.add_event_handler("EPOCH_STARTED", shuffle)
    trainer.add_event_handler("ITERATION_COMPLETED", record)
    trainer.run()
    assert sum(losses[-4:]) < sum(losses[:4])

    uneven = DistributedSampler(data, even_divisible=False, shuffle=False)
    binary = Compose([Activationsd("pred", sigmoid=True), AsDiscreted("pred", threshold=0.5)])
    evaluator = SupervisedEvaluator(
        device=CPU, val_data_loader=DataLoader(data, batch_size=4, sampler=uneven), network=model,
        postprocessing=binary,
        key_val_metric={"dice": MeanDice(output_transform=from_engine(["pred", "label"]))},
    )  # fmt: skip
    evaluator.run()
    metric = DiceMetric(reduction="none")
    with torch.no_grad():
        for index in uneven:
            shown = data[index]
            metric((model(shown["image"][None]) > 0).float(), shown["label"][None])
    names = string_list_all_gather([f"rank {rank} of {size}"] * (rank + 1))
    assert names == ["rank 0 of 2", "rank 1 of 2", "rank 1 of 2"]
    dices = metric.aggregate()
    assert len(dices) == IMAGES
    evidence.write(
        options.folder, losses, model,
        mean_dice=evaluator.state.metrics["dice"], dices=dices, mean_loss=average.aggregate(),
        gathered=evenly_divisible_all_gather(torch.tensor(losses[rank:])),
    )  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Trains a policy with torchrl's PPO. A collector starts rank 1, which runs the environment."""

from __future__ import annotations

from typing import Any

import evidence
import torch
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.collectors.distributed import DistributedCollector
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import EnvBase
from torchrl.modules import NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

BATCHES = 6
FRAMES = 64  # of a batch
STEPS = 16  # of an episode


class Plane(EnvBase):  # type: ignore[misc]
    """A point on a plane. Its reward is higher the closer it is to the origin."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(point=Unbounded((2,)))
        self.action_spec = Bounded(-1, 1, (2,))
        self.reward_spec = Unbounded((1,))
        torch.manual_seed(0)

    def _reset(self, _: TensorDictBase | None = None) -> TensorDict:
        self.left = STEPS
        return TensorDict({"point": 4 * torch.rand(2) - 2})

    def _step(self, state: TensorDictBase) -> TensorDict:
        self.left -= 1
        point = state["point"] + 0.5 * state["action"]
        reward, done = -point.norm().reshape(1), torch.tensor([self.left == 0])
        return TensorDict({"point": point, "reward": reward, "done": done})

    def _set_seed(self, seed: int | None) -> None:
        raise NotImplementedError


class Recording(Collector):  # type: ignore[misc]
    """Collects on the started rank, and writes the report of this rank."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.rewards: list[float] = []
        self.points: list[torch.Tensor] = []

    def next(self) -> TensorDictBase:
        batch = super().next()
        self.rewards.append(batch["next", "reward"].mean().item())
        self.points.append(batch["next", "point"].clone())
        return batch

    def shutdown(self, *arguments: Any, **more: Any) -> None:
        if not self.closed:
            evidence.write(
                evidence.options().folder, self.rewards, self.policy, dist.group.WORLD,
                points=torch.stack(self.points),
            )  # fmt: skip
        super().shutdown(*arguments, **more)


def policy() -> ProbabilisticActor:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 4), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(network, in_keys=["point"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"], distribution_class=TanhNormal, return_log_prob=True,
    )  # fmt: skip


def main() -> None:
    options = evidence.options()
    actor = policy()
    critic = ValueOperator(
        nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)), in_keys=["point"]
    )
    advantage = GAE(gamma=0.95, lmbda=0.9, value_network=critic)
    objective = ClipPPOLoss(actor, critic, entropy_coeff=0.01)
    optimizer = torch.optim.Adam(objective.parameters(), lr=3e-3)
    collector = DistributedCollector(
        [Plane] * (options.ranks - 1), actor, collector_class=Recording, sync=True,
        collector_kwargs={"auto_register_policy_transforms": True},
        frames_per_batch=FRAMES, total_frames=FRAMES * (BATCHES + 1), update_interval=1,
        launcher="mp", backend=options.backend or "gloo",
    )  # fmt: skip
    losses: list[float] = []
    points: list[torch.Tensor] = []
    for stack in collector:
        batch = stack.contiguous()
        points.append(batch["next", "point"].flatten(0, -2))
        for _ in range(4):
            advantage(batch)
            values = objective(batch.reshape(-1))
            loss = values["loss_objective"] + values["loss_critic"] + values["loss_entropy"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if len(points) == BATCHES:
            break
    collector.update_policy_weights_()
    evidence.write(options.folder, losses, actor, dist.group.WORLD, points=torch.stack(points))
    collector.shutdown()
    sent = torch.load(options.folder / "rank1.pt")["numbers"]
    assert torch.equal(sent["points"], torch.stack(points))
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()

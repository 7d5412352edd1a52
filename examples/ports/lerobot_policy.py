"""A loop of one's own for a policy of LeRobot."""

import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from torch.utils.data import DataLoader

from project import CHUNK, small_act

STEPS = 40
device = "cuda" if torch.cuda.is_available() else "cpu"
times = [step / 10 for step in range(CHUNK)]  # 10 frames a second
dataset = LeRobotDataset(
    "mine/walks", root="walks", delta_timestamps={"action": times}
)
loader = DataLoader(dataset, batch_size=16, shuffle=True)

torch.manual_seed(0)
policy, normalize = small_act(dataset.meta)
policy = policy.to(device).train()
optimizer = torch.optim.AdamW(policy.get_optim_params(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)

step = 0
while step < STEPS:
    for batch in loader:
        batch = normalize(batch)
        loss, _ = policy(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        step += 1
        if step == STEPS:
            break
torch.save(policy.state_dict(), "model.pth")

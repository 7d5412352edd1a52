"""An accelerate script: a mean teacher, a ramp, accumulation, warm-up."""

import copy

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader

from project import Net, Pictures

EPOCHS, RAMP = 4, 30
accelerator = Accelerator(gradient_accumulation_steps=2)
loader = DataLoader(Pictures(192), batch_size=8, shuffle=True)

torch.manual_seed(0)
model = Net()
teacher = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min(1.0, (step + 1) / 10)
)
model, teacher, optimizer, loader = accelerator.prepare(
    model, teacher, optimizer, loader
)

step = 0
for epoch in range(EPOCHS):
    model.train()
    for x, y in loader:
        with accelerator.accumulate(model):
            output = model(x)
            target = teacher(x).softmax(1)
            loss = cross_entropy(output, y)
            ramp = min(1.0, step / RAMP)
            loss = loss + ramp * mse_loss(output.softmax(1), target)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            scheduler.step()
            step += 1
            with torch.no_grad():
                for old, new in zip(teacher.parameters(), model.parameters()):
                    old.lerp_(new, 0.05)
torch.save(accelerator.unwrap_model(teacher).state_dict(), "model.pth")

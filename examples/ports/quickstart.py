"""The loop of PyTorch's quickstart."""

import torch
from torch import nn
from torch.utils.data import DataLoader

from project import Net, Pictures

device = "cuda" if torch.cuda.is_available() else "cpu"
train_loader = DataLoader(Pictures(200), batch_size=16, shuffle=True)
test_loader = DataLoader(Pictures(80, seed=1), batch_size=16)

torch.manual_seed(0)
model = Net().to(device)
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)


def train():
    model.train()
    for x, y in train_loader:
        x, y = x.to(device), y.to(device)
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test(epoch):
    model.eval()
    loss, hits = 0.0, 0
    with torch.no_grad():
        for x, y in test_loader:
            x, y = x.to(device), y.to(device)
            output = model(x)
            loss += loss_fn(output, y).item()
            hits += (output.argmax(1) == y).sum().item()
    print(epoch, loss / len(test_loader), hits / len(test_loader.dataset))


for epoch in range(5):
    train()
    scheduler.step()
    test(epoch)
torch.save(model.state_dict(), "model.pth")

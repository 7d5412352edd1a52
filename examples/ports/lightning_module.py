"""A Lightning module: one-cycle rate, smoothed labels at first, an average."""

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from project import Net, Pictures


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, batch_idx):
        x, y = batch
        smoothing = 0.2 if self.current_epoch < 2 else 0.0
        loss = cross_entropy(self.net(x), y, label_smoothing=smoothing)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        output = self.net(x)
        self.log("loss", cross_entropy(output, y))
        self.log("accuracy", (output.argmax(1) == y).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.01, total_steps=steps
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


lightning.seed_everything(0)
model = Classifier()
stop = EarlyStopping("loss", patience=2)
trainer = lightning.Trainer(
    max_epochs=8,
    gradient_clip_val=1.0,
    callbacks=[stop, EMAWeightAveraging(decay=0.9)],
)
train_loader = DataLoader(Pictures(200), batch_size=16, shuffle=True)
val_loader = DataLoader(Pictures(80, seed=1), batch_size=80)
trainer.fit(model, train_loader, val_loader)
torch.save(model.net.state_dict(), "model.pth")

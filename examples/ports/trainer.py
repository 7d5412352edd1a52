"""A Trainer of Hugging Face with a loss of its own."""

import torch
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

from project import Words, small_bert

CLASS_WEIGHTS = torch.tensor([1.0, 3.0])


class WeightedTrainer(Trainer):
    def compute_loss(
        self, model, inputs, return_outputs=False, num_items_in_batch=None
    ):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(
            outputs.logits, labels, weight=CLASS_WEIGHTS.to(labels.device)
        )
        return (loss, outputs) if return_outputs else loss


def compute_metrics(prediction):
    hits = prediction.predictions.argmax(1) == prediction.label_ids
    return {"accuracy": hits.mean()}


torch.manual_seed(0)
model = small_bert()
args = TrainingArguments(
    output_dir="trainer",
    num_train_epochs=4,
    per_device_train_batch_size=16,
    learning_rate=3e-3,
    weight_decay=0.01,
    warmup_steps=10,
    lr_scheduler_type="cosine",
    eval_strategy="epoch",
    save_strategy="epoch",
    load_best_model_at_end=True,
    metric_for_best_model="accuracy",
    report_to="none",
)
trainer = WeightedTrainer(
    model=model,
    args=args,
    train_dataset=Words(200),
    eval_dataset=Words(80, seed=1),
    compute_metrics=compute_metrics,
    callbacks=[EarlyStoppingCallback(2)],
)
trainer.train()
torch.save(model.state_dict(), "model.pth")

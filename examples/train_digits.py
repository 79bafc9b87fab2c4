"""Train a network to read handwritten digits, on one device or on many.

python examples/train_digits.py
torchrun --nproc-per-node 2 examples/train_digits.py
rankbook.notebook_launcher(main)  # on the ranks of a notebook
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from rankbook import Accelerator, set_seed


def main(epochs: int = 10) -> float:
    """Train for `epochs` epochs and return the test accuracy, which is the same on every rank."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)

    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
    test_set, train_set = random_split(TensorDataset(images, labels), [451, len(labels) - 451])
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(64 * 4 * 4, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=64)
    model, optimizer, scheduler, train_loader, test_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, test_loader
    )

    for epoch in range(epochs):
        model.train()
        total = torch.zeros((), device=accelerator.device)
        for image, label in train_loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(image), label)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            total += loss.detach()
        loss = accelerator.reduce(total, "mean") / len(train_loader)
        accelerator.print(f"epoch {epoch + 1:2}  loss {loss.item():.4f}")

    model.eval()
    right = seen = 0
    with torch.no_grad():
        for image, label in test_loader:
            guess, truth = accelerator.gather_for_metrics((model(image).argmax(dim=1), label))
            right += (guess == truth).sum().item()
            seen += len(truth)
    accelerator.print(f"test accuracy {right / seen:.1%} of {seen} images, world size {accelerator.num_processes}")
    return right / seen


if __name__ == "__main__":
    main()

"""The three models in torch: the mean loss of a batch, and what they say of test samples."""

from typing import Any

import data
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]


class Columns(torch.utils.data.Dataset):
    """Arrays of as many rows each, read a batch at a time."""

    def __init__(self, columns: dict[str, np.ndarray]):
        self.columns = {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in columns.items()}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitems__(self, indices: list[int]) -> dict[str, Any]:
        rows = torch.tensor(indices)
        return {k: v[rows] for k, v in self.columns.items()}


class Passes(Columns):
    """The same in passes of `most` rows, `number` of which: after all rows, again in the same order."""

    def __init__(self, columns: dict[str, np.ndarray], most: int, seed: int):
        super().__init__(columns)
        num = super().__len__()
        self.order = torch.from_numpy(np.random.default_rng(seed).permutation(num))
        self.most = min(most, num)
        self.number = 0

    def __len__(self) -> int:
        return self.most

    def __getitems__(self, indices: list[int]) -> dict[str, Any]:
        rows = (torch.tensor(indices) + self.number * self.most) % len(self.order)
        return super().__getitems__(self.order[rows].tolist())


class Model(torch.nn.Module):
    """Parameters by name; `forward` is the mean loss of a batch."""

    a: Any
    a_bias: Any
    b: Any
    b_bias: Any
    tables: Any
    bytes: Any
    places: Any
    head: Any

    def __init__(self, name: str, train: dict[str, np.ndarray], seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.name = name
        for key, (shape, spread) in data.shapes(name, train).items():
            start = torch.ones(shape) if np.isinf(spread) else torch.randn(shape) * spread
            if len(shape) == 4:
                start = start.permute(3, 2, 0, 1).contiguous()
            setattr(self, key, torch.nn.Parameter(start))

    def forward(self, batch: dict[str, Any]) -> Any:
        return getattr(self, f"{self.name}_loss")(batch).mean()

    def dense(self, key: str, x: Any) -> Any:
        return x @ getattr(self, key) + getattr(self, f"{key}_bias")

    def digits(self, batch: dict[str, Any]) -> Any:
        x = batch["image"].permute(0, 3, 1, 2)
        x = F.relu(F.conv2d(x, self.a, self.a_bias, padding=1))
        x = F.relu(F.conv2d(x, self.b, self.b_bias, stride=2, padding=1))
        return self.dense("d", F.relu(self.dense("c", x.flatten(1))))

    def digits_loss(self, batch: dict[str, Any]) -> Any:
        return F.cross_entropy(self.digits(batch), batch["label"].long(), reduction="none")

    def digits_test(self, batch: dict[str, Any]) -> Any:
        return self.digits(batch).argmax(dim=1)

    def recommender_test(self, batch: dict[str, Any]) -> Any:
        embedded = F.embedding(batch["rows"].long(), self.tables)
        products = embedded @ embedded.transpose(1, 2)
        upper = torch.triu_indices(data.TABLES, data.TABLES, 1)
        x = torch.cat([embedded.flatten(1), products[:, upper[0], upper[1]]], dim=1)
        return self.dense("c", F.relu(self.dense("b", F.relu(self.dense("a", x)))))[:, 0]

    def recommender_loss(self, batch: dict[str, Any]) -> Any:
        scores, label = self.recommender_test(batch), batch["label"].float()
        return F.binary_cross_entropy_with_logits(scores, label, reduction="none")

    def normed(self, key: str, x: Any) -> Any:
        return x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + 1e-6) * getattr(self, key)

    def lm_loss(self, batch: dict[str, Any]) -> Any:
        codes = batch["windows"].long()
        x = self.bytes[codes[:, :-1]] + self.places
        for i in range(data.LAYERS):
            parts = (self.normed(f"scale_a{i}", x) @ getattr(self, f"attention{i}")).chunk(3, -1)
            heads = [p.unflatten(-1, (data.HEADS, -1)).transpose(1, 2) for p in parts]
            mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + mixed.transpose(1, 2).flatten(2) @ getattr(self, f"attention_out{i}")
            hidden = self.normed(f"scale_b{i}", x) @ getattr(self, f"mlp{i}")
            x = x + F.gelu(hidden, approximate="tanh") @ getattr(self, f"mlp_out{i}")
        logits = self.normed("scale", x) @ self.head
        losses = F.cross_entropy(logits.transpose(1, 2), codes[:, 1:], reduction="none")
        return losses.mean(dim=1) / np.log(2)

    lm_test = lm_loss


def optimizer(name: str, model: Model, rate: float) -> Any:
    """The workload's own. optax adds its 1e-7 under Adagrad's root."""
    if name == "digits":
        return torch.optim.SGD(model.parameters(), rate, momentum=0.9, nesterov=True)
    if name == "recommender":
        return torch.optim.Adagrad(
            model.parameters(), rate, initial_accumulator_value=2e-7, eps=0.0, fused=True
        )
    return torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.99), weight_decay=0.01)


def evaluate(model: Model, test: dict[str, np.ndarray]) -> float:
    """The metric on all test samples."""
    columns = Columns(test).columns
    size = len(next(iter(columns.values())))
    with torch.no_grad():
        outputs = [
            getattr(model, f"{model.name}_test")(
                {k: v[start : start + 8192] for k, v in columns.items()}
            )
            for start in range(0, size, 8192)
        ]
    return data.value(model.name, torch.cat(outputs).numpy(), test)

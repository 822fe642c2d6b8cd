"""Operations of PyTorch that look like others: each is imported with equal numbers, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import layoutopt  # noqa: E402
from mesh_tf_core.errors import UserError  # noqa: E402
from tests.importers.torch_models import compared  # noqa: E402

Made = Callable[[torch.Tensor], torch.Tensor]


def _chosen(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a mixture by hand: those with a large element, as often as they have one, each times it."""
    rows, nth = torch.where(y > 0.3)
    return rows, y[rows].square() * y[rows, nth, None]


CLASSES = torch.tensor([1, 2, 3, 0])
EQUAL: dict[str, Made] = {
    "std": lambda y: y.std(-1),
    "std of all, biased": lambda y: y.std(unbiased=False),
    "var, biased": lambda y: y.var(unbiased=False),
    "var along an axis": lambda y: y.var(1, unbiased=True),
    "var with a correction": lambda y: y.var(1, correction=2),
    "argmin": lambda y: y * y.argmin(-1, keepdim=True),
    "argmax of all": lambda y: y * y.argmax(),
    "topk": lambda y: torch.topk(y, 2)[0],
    "div towards zero": lambda y: y * torch.div(y * 7, 2.0, rounding_mode="trunc"),
    "div downwards": lambda y: y * torch.div(y * 7, 2.0, rounding_mode="floor"),
    "whole numbers downwards": lambda y: y * ((y * 9).to(torch.int32) // 2),
    "whole numbers towards zero": lambda y: y * torch.div((y * 9).int(), 2, rounding_mode="trunc"),
    "addmm of a row": lambda y: torch.addmm(y[0], y, y.mT @ y),
    "addmm of a matrix": lambda y: torch.addmm(y, y, y.mT @ y),
    "addmm with factors": lambda y: torch.addmm(y, y, y.mT @ y, beta=2, alpha=3),
    "an index from the end": lambda y: y[torch.tensor([-1, 0, 2, 1])],
    "an index from the end of a column": lambda y: y[:, torch.tensor([-1, 0])],
    "an index that is computed": lambda y: y[(y[:, 0] * 0).long() - 1],
    "nll_loss of log-sigmoids": lambda y: F.nll_loss(F.logsigmoid(y), CLASSES),
    "nll_loss of log_softmax": lambda y: F.nll_loss(F.log_softmax(y, -1), CLASSES),
    "cross_entropy with an ignored class": lambda y: F.cross_entropy(y, torch.tensor([1, 2, -100, 0])),
    "logical_not of whole numbers": lambda y: y * torch.logical_not((y * 2).int()),
    "dropout of all": lambda y: F.dropout(y, 1.0) + y,
    "avg_pool with a divisor": lambda y: F.avg_pool2d(y[None, None], 2, divisor_override=3),
    "clamp by name": lambda y: y.clamp(min=-0.2, max=0.3),
    "group_norm of its own kernel": lambda y: y * torch.group_norm(y, 2, cudnn_enabled=False),
    "pad with a value": lambda y: F.pad(y, (1, 2), value=2.0),
    "histc of whole numbers": lambda y: y * torch.histc((y * 3).abs().floor(), bins=6, min=0, max=5),
    "histc of fractions": lambda y: y * torch.histc(y, bins=6, min=-0.5, max=0.25),
    "histc with an end that occurs": lambda y: y * torch.histc((y * 9).abs().floor(), bins=6, min=0, max=6),
    "binary cross entropy": lambda y: F.binary_cross_entropy_with_logits(y, torch.ones(4, 6)),
}
ROWS = torch.tensor([2, 0, 2, 3, 1, 0, 3, 3])
"""Rows that are read or written: some twice."""
EACH = torch.tensor([[2, 0, 2, 3, 1, 0], [0, 1, 1, 2, 3, 3], [3, 3, 0, 0, 1, 1]])
APART = torch.tensor([[0, 3], [1, 2], [5, 0], [4, 1]])
AT_PLACES: dict[str, Made] = {
    "gather of rows": lambda y: torch.gather(y, 0, ROWS.reshape(-1, 1).expand(-1, 6)),
    "gather of repeated rows": lambda y: torch.gather(y, 0, ROWS[:, None].repeat(1, 6)),
    "gather of columns": lambda y: y.T.gather(1, ROWS.expand(6, -1)),
    "gather of single elements": lambda y: torch.gather(y, 0, EACH),
    "gather of fewer columns": lambda y: torch.gather(y, 0, EACH[:, :4]),
    "scatter_add of rows": lambda y: y.scatter_add(0, ROWS[:, None].expand(-1, 6), torch.cat([y, y * y])),
    "scatter_add of columns": lambda y: y.T.scatter_add(1, ROWS.expand(6, -1), torch.cat([y, y * y]).T),
    "scatter_add of single elements": lambda y: y.scatter_add(0, EACH, y[1:] * y[1:]),
    "index_add of rows": lambda y: y.index_add(0, ROWS, torch.cat([y, y * y])),
    "index_add of columns": lambda y: y.T.index_add(-1, ROWS, torch.cat([y, y * y]).T, alpha=2),
    "index_add of rows that a mask selects": lambda y: y.index_add(0, *_chosen(y)),
    "scatter_add in place": lambda y: y.square().scatter_add_(0, EACH, y[:3]),
    "extremes at places": lambda y: y.scatter_reduce(0, EACH, y.square()[:3] * 3, "amax"),
    "extremes of some places": lambda y: y.scatter_reduce(0, EACH % 2, y[1:] * 3, "amin", include_self=False),
    "extremes of rows that are equal": lambda y: y.scatter_reduce(
        0, ROWS[:, None].expand(-1, 6), torch.cat([y, y]).round(decimals=1) + 0 * y.sum(), "amax"
    ),
    "scatter of rows": lambda y: y.scatter(0, ROWS[2:5, None].expand(-1, 6), y[:3] * y[:3]),
    "scatter of single elements": lambda y: y.scatter(1, APART, y[:, :2]),
    "scatter of a number": lambda y: y.scatter(0, ROWS[:2, None].expand(-1, 6), 0.5),
}
EQUAL |= AT_PLACES


def _written(y: torch.Tensor) -> torch.Tensor:
    """Every third element written, and an empty slice."""
    y = y * 1.0
    y[:, 1::3] = y[:, :1] * 2
    y[::2] += 1
    y[:, 6:] = 0
    return y


def _columns(y: torch.Tensor) -> torch.Tensor:
    """Some columns written, and added to."""
    z = y * 1.0
    z[:, torch.tensor([2, 0, 5])] = y[:, :3] * 2
    z[:, APART[:, 0]] += y[0, 0]
    return z


def _close(y: torch.Tensor) -> torch.Tensor:
    near = y.sin() > 0
    return F.mse_loss(y[near], y.cos()[near]) + F.l1_loss(y[near], y.exp()[near], reduction="sum")


def _experts(y: torch.Tensor) -> torch.Tensor:
    """Two of three experts for each row, which write theirs; and rows that are replaced."""
    choice, z = torch.stack([CLASSES % 3, (CLASSES + 1) % 3], 1), y * 1.0
    for expert in range(3):
        rows, place = torch.where(choice == expert)
        z[rows] += y[rows, place, None] * torch.tanh(y[rows] * (expert + 1))
    (rows,) = torch.where(CLASSES > 1)
    z[rows] = z[rows] * y[rows].exp()
    return z.index_put((rows,), y[rows].sin(), accumulate=True)


_IMAGE = torch.arange(2 * 3 * 3 * 3.0).reshape(2, 3, 3, 3).sin()
_SPACE: dict[str, Made] = {
    "padded pooling": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "padded pooling of what is there": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "pooling that rounds up": lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True),
    "largest that rounds up": lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True),
    "pooling to unequal windows": lambda x: F.adaptive_avg_pool2d(x, (3, 5)),
    "bilinear": lambda x: F.interpolate(x, size=(13, 5), mode="bilinear"),
    "bicubic by a factor": lambda x: F.interpolate(x, scale_factor=1.6, mode="bicubic"),
    "nearest": lambda x: F.interpolate(x, size=(13, 5)),
    "a transposed convolution": lambda x: F.conv_transpose2d(x, _IMAGE[..., :2, :2], stride=2),
    "one that overlaps": lambda x: F.conv_transpose2d(x, _IMAGE, None, 2, 1, 1),
    "one of groups": lambda x: F.conv_transpose2d(x, _IMAGE[..., :2], None, (2, 1), 1, groups=2, dilation=2),
    "pixel_shuffle": lambda x: F.pixel_shuffle(F.pad(x, (0, 0, 0, 0, 0, 2)), 2),
}
"""Of an image [1, 2, 4, 6]."""
SELECTED: dict[str, Made] = {
    "elements": lambda y: y[y > 0].mean() + y.masked_select(y < 0).square().sum(),
    "rows": lambda y: F.softmax(y[y[:, 0] > -9] * y[:, :1][y[:, 0] > -9], -1).sum(0),
    "targets": lambda y: F.cross_entropy(y[CLASSES > 0], CLASSES[CLASSES > 0]),
    "targets one by one": lambda y: F.nll_loss(
        F.log_softmax(y[CLASSES < 3], 1), CLASSES[CLASSES < 3], reduction="none"
    ).mean(),
    "losses of smaller operations": _close,
    "products": lambda y: y[y > 0] @ y[y > 0],
    "divided by their number": lambda y: y[y > 0].sum() / y[y > 0].numel() + y[:, y[0] > 0].sum(),
    "places": lambda y: y[torch.nonzero(y[:, 0] > -9)[:, 0], 1:3].mean(0) + y[torch.where(y > 0)].sum(),
    "lines of rows": lambda y: (y[CLASSES > 1].view(-1) + y[CLASSES > 1].flatten()).mean(),
    "none": lambda y: y.sum() + y[y > 99].sum(),
    "rows of experts in a loop": _experts,
}
"""Of y, with the shape [4, 6]."""
Twice = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
TWICE: dict[str, Twice] = {
    "elements": lambda z, _: z[z < 0.3].sum() + z.masked_select(z < 0.1).square().mean(),
    "rows": lambda z, _: z[z[:, 1] > 0.1].square().sum(0),
    "their number": lambda z, _: z.sum() / (1 + z[z < 0.1].numel()) + torch.nonzero(z[:, 0] > 0).shape[0],
    "targets": lambda z, t: F.cross_entropy(z[t < 3], t[t < 3]),
    "a third time": lambda z, t: (lambda a: a[a[:, 0] < 9].mean(1).sum())(z[t < 3]),
    "lines": lambda z, _: (lambda a: a[a < 0.2].exp().sum())(z.reshape(-1)),
    "columns": lambda z, _: z[:, 1:4][z[:, 1:4] > 0].mean(),
}
"""Of rows that a mask selected already, and their classes."""
SELECTED |= {
    f"twice: {name}": lambda y, of=of: of(y[CLASSES > 0], CLASSES[CLASSES > 0]) for name, of in TWICE.items()
}
NAN = torch.where(torch.arange(24).reshape(4, 6) % 5 < 3, 0.5, float("nan"))
OUTSIDE: dict[str, Made] = {
    "targets that are nan": lambda y: (lambda k: F.mse_loss(y[k], NAN[k]))(~NAN.isnan()),
    "differences that are nan": lambda y: (y - NAN)[~NAN.isnan()].square().mean(),
    "logarithms": lambda y: -(lambda p: p[p > 0].log().mean() + (p[p > 0] * p[p > 0].log()).sum())(y.relu()),
    "roots": lambda y: y[y > 0].sqrt().sum() + (y[y > 0] ** 1.5).mean(),
    "quotients": lambda y: (lambda r: (1 / r[r != 0]).sum())(y.relu()),
    "powers beside large numbers": lambda y: (lambda r: r[r < 1].exp().sum())(
        torch.where(y > 0.3, y * 1e6, y)
    ),
    "a domain without 1": lambda y: (1 - y[y < 0]).log().sum() + (y[y < 0] - 1).pow(-2.0).mean(),
    "products with weights": lambda y: (y[y[:, 0] > 9] @ y.mT - 99).log().sum() + y.sum(),
    "factors": lambda y: (y[y[:, 0] > 9] * y[0] - 99).sqrt().sum() + y.sum(),
    "shifts by a mean": lambda y: (y[y > 0] / y.relu().sum()).log().sum(),
    "places": lambda y: (
        y[torch.where(y > 0)].sqrt().sum() + y[torch.nonzero(y[:, 1] > 0)[:, 0], 1].log().mean()
    ),
    "chosen twice": lambda y: (lambda z: z[z > 0].log().sum())(y[CLASSES > 0]),
}
"""Operations whose domain leaves out elements that are not selected."""
SELECTED |= {f"in a domain: {name}": made for name, made in OUTSIDE.items()}
SMALLER: dict[str, Made] = {
    "activations": lambda y: F.hardswish(y) + F.hardsigmoid(y) + F.elu(y) + F.relu6(y * 1.0, inplace=True),
    "gates": lambda y: F.glu(y) + torch.nan_to_num(y.logit(1e-3))[:, :3],
    "orders of norms": lambda y: F.normalize(y, p=1) * y.norm(dim=1, keepdim=True),
    "one window of a line": lambda y: y * F.adaptive_avg_pool1d(y[None], 1)[0],
    "one window of space": lambda y: y * F.adaptive_avg_pool3d(y.reshape(1, 1, 4, 3, 2), 1).squeeze(),
    "windows": lambda y: y.unfold(1, 4, 2).sum() + y.unfold(-2, 2, 1).square(),
    "weighted classes": lambda y: F.nll_loss(F.log_softmax(y, -1), CLASSES, torch.arange(1.0, 7)),
    "probabilities of classes": lambda y: F.cross_entropy(y, y.sin().softmax(-1).detach()),
    "losses": lambda y: F.smooth_l1_loss(y, y.sin(), beta=0.5) + F.huber_loss(y, y.cos(), delta=0.3),
    "meshgrid by columns": lambda y: torch.meshgrid(y[0], y[1], indexing="xy")[0],
    "finite": lambda y: torch.where(torch.isfinite(y) & ~torch.isinf(y), y, 0.0) + torch.round(y).detach(),
    "products": lambda y: y.prod(1) + torch.log2(y.abs() + 1).cumprod(1)[:, -1],
    "slices with steps": _written,
    "softplus at 0": lambda y: F.softplus(y - y.detach()) + F.softplus(60 * y, beta=3) * y,
    "log-sigmoid at 0": lambda y: F.logsigmoid(y - y.detach()) * y.detach(),
    "entropy at 0": lambda y: F.binary_cross_entropy_with_logits(y - y.detach(), torch.ones(4, 6)) + y.sum(),
    **{name: lambda y, of=of: of(torch.stack([y, y.sin()])[None]) for name, of in _SPACE.items()},
}
"""Mostly operations that have no rule of their own, but a definition by smaller ones."""
SMALLER |= {
    "the smallest": lambda y: torch.topk(y, 2, largest=False)[0] + torch.topk(y, 3, 0)[0][:, :2].sum(0),
    "descending order": lambda y: y.sort(descending=True)[0] * y.argsort(0, descending=True),
    "medians": lambda y: y.median() + y.median(1)[0].sum(),
    "extremes beside nan": lambda y: torch.fmax(y, y.sin()) + torch.fmin(y, torch.tensor(float("nan"))),
    "parts of numbers": lambda y: y * torch.trunc(9 * y) + torch.frac(9 * y),
    "an index of axes apart": lambda y: y.reshape(2, 2, 6)[APART.T[0, :2], :, ROWS[:2]],
    "a mask that is filled": lambda y: torch.index_put(y, (y > 0,), y.new_tensor(0.5)),
    "rows that are filled": lambda y: torch.index_put(y * 1.0, (CLASSES > 1,), y[0]),
    "columns that are written": _columns,
    "means for places": lambda y: y.scatter_reduce(0, EACH, y[:3], "mean"),
    "sums for places alone": lambda y: y.scatter_reduce(0, EACH, y[:3], "sum", include_self=False),
    "bags": lambda y: (
        F.embedding_bag(EACH % 4, y, mode="mean") + F.embedding_bag(APART % 4, y, mode="max")[:3]
    ),
    "bags of unequal sizes": lambda y: F.embedding_bag(ROWS, y, torch.tensor([0, 3, 3, 7]), mode="mean"),
    "bags with weights": lambda y: F.embedding_bag(EACH % 4, y, mode="sum", per_sample_weights=y[:3]),
    "a norm of each example": lambda y: F.instance_norm(y.reshape(2, 2, 6), weight=y[0, :2], bias=y[1, :2]),
    "an image whose channels lie last": lambda y: F.adaptive_avg_pool2d(
        y.reshape(1, 2, 3, 4).permute(0, 3, 1, 2), 1
    ),
    "a limit of a number of rows": lambda y: y.sum() / max(y[y > 0].numel(), 1) + min(9, (y > 0).sum()) * y,
    "a limit of no rows": lambda y: y.sum() / max(1, y[y > 9].shape[0]),
    "angles": lambda y: torch.acos(y / 9) + torch.asin(y / 9) * 2 + torch.atan(y) * 3,
    "an identity": lambda y: y + torch.eye(4, 6) + torch.eye(6)[:4],
    "logarithms of running sums": lambda y: torch.logcumsumexp(9 * y, 1) + torch.logcumsumexp(y, 0),
    "running sums of equal, and of nothing": lambda y: torch.logcumsumexp(
        torch.stack([y, y, y.new_tensor(float("-inf")).expand(4, 6), y.detach() * 99]), 0
    )[1:],
    "logarithms of two": lambda y: torch.logaddexp(y, y[:1] * 3),
    "distances of few rows": lambda y: torch.cdist(y, y[:3]) + torch.cdist(y, y[:3].sin(), p=1.5),
    "distances of many rows": lambda y: torch.cdist(y.repeat(9, 1), torch.cat([y, y.cos()]))[:9],
    "groups of an image": lambda y: F.group_norm(y.reshape(2, 4, 1, 3), 2, y[:, 0], y[:, 1]),
    "a norm of several axes": lambda y: F.layer_norm(
        y.reshape(2, 2, 2, 3), (2, 2, 3), y[:2].reshape(2, 2, 3)
    ),
    "a norm of one element": lambda y: y + F.layer_norm(y[..., None], (1,)).squeeze(-1),
    "gelu": lambda y: F.gelu(3 * y) + F.gelu(y, approximate="tanh"),
    "arrays to one shape": lambda y: torch.broadcast_tensors(y[:1], y[:, :1])[0] * y,
    "a diagonal": lambda y: torch.diagonal(y @ y.mT) + torch.diag(y[:, :4]) * y.mT.trace(),
    "diagonals beside the main one": lambda y: (
        y.reshape(2, 3, 4).diagonal(1, 1, 2) + y.reshape(3, 4, 2).diagonal(-1, -2, 0)
    ),
    "a matrix with a diagonal": lambda y: torch.diag_embed(y) @ torch.diag(y[0]) + torch.diag(y[:, 0], 2),
    "the entropy of a distribution": lambda y: torch.distributions.Categorical(logits=y).entropy(),
}
EQUAL |= SMALLER | {f"selected {name}": made for name, made in SELECTED.items()}
REFUSED: dict[str, tuple[Made, str]] = {
    "a gradient penalty": (
        lambda y: torch.autograd.grad(y.square().sum(), y, create_graph=True)[0],
        "torch.autograd.grad is called in the forward",
    ),
    "places among selected rows": (lambda y: y[y[:, 0] > 0][torch.tensor([0, 0])], "a mask selects"),
    "sorted selected rows": (lambda y: y[y[:, 0] > 0].sort(0)[0], "a mask selects"),
    "rows of two masks": (
        lambda y: F.linear(y[y[:, 0] > -9], y) - F.linear(y[y[:, 0] < 9], y),
        "trace|masks",
    ),
    "products at places": (lambda y: y.scatter_reduce(0, EACH, y[:3], "prod"), "reduce='prod'"),
    "bags with their end": (
        lambda y: F.embedding_bag(ROWS, y, torch.tensor([0, 3, 8]), include_last_offset=True),
        "an offset for the end",
    ),
    "histc with bins of the values": (lambda y: y * torch.histc(y, bins=6), "bins are between the least"),
    "scatter that multiplies": (lambda y: y.scatter(0, EACH, y, reduce="multiply"), "reduce=multiply"),
    "scatter_add to some columns": (lambda y: y.scatter_add(0, EACH[:, :2], y), "some places of the other"),
    "interpolation without aliases": (
        lambda y: F.interpolate(y[None, None], 3, mode="bilinear", antialias=True),
        "cannot import torch._upsample_bilinear2d_aa",
    ),
}


class Applied(nn.Module):
    """A layer, and an operation of its result."""

    def __init__(self, made: Made) -> None:
        super().__init__()
        self.made, self.layer = made, nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.made(self.layer(x)).float().square().sum()


def of(made: Made) -> float:
    torch.manual_seed(0)
    return compared(Applied(made), {"x": torch.randn(4, 6)})[1]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", EQUAL)
def test_numbers_equal_those_of_pytorch(name: str) -> None:
    assert of(EQUAL[name]) < 1e-5


@pytest.mark.one_in(24)
@pytest.mark.parametrize("name", AT_PLACES)
def test_places_are_those_of_pytorch_under_every_split(name: str) -> None:
    torch.manual_seed(0)
    module, batch = Applied(AT_PLACES[name]), {"x": torch.randn(4, 6)}
    model, worst = compared(module, batch)
    split = 0
    for dim in model.graph.dims():
        with suppress(UserError):
            worst = max(worst, compared(module, batch, None, "data:2", f"{dim}:data")[1])
            split += 1
    assert worst < 1e-5 and split > 1, (model.graph.dims(), split)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_rule_is_refused_with_its_reason(name: str) -> None:
    made, why = REFUSED[name]
    with pytest.raises(UserError, match=why):
        of(made)


DRAWN: dict[str, Made] = {
    "rand": lambda y: torch.rand(y.shape).exp(),
    "randn_like": lambda y: torch.randn_like(y).abs(),
    "randint": lambda y: torch.randint(3, 7, y.shape).float().square(),
    "randint from 0": lambda y: torch.randint_like(y, 5).square(),
    "dropout of channels": lambda y: F.dropout2d((y + 1)[:, :, None, None], 0.4).square(),
    "stochastic depth": lambda y: y.clone().bernoulli_(0.6).div_(0.3).square(),
    "halves": lambda y: 3 * y.clone().bernoulli_(),
    "probabilities": lambda y: torch.bernoulli(y + 0.3),
    "uniform": lambda y: y.clone().uniform_(-1, 3).square(),
    "normal": lambda y: y.clone().normal_(1, 0.5).square(),
    "exponential": lambda y: y.clone().exponential_(2.0),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", DRAWN)
def test_numbers_that_are_drawn_have_the_same_mean(name: str) -> None:
    made = DRAWN[name]
    assert (
        compared(Applied(lambda y: y.mean() ** 2 + made(torch.zeros(256, 256))), {"x": torch.randn(4, 6)})[1]
        < 0.02
    )


class MaskedLoss(nn.Module):
    """A loss over the rows that a mask of the batch selects."""

    def __init__(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.loss, self.layer = loss, nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.loss(self.layer(x)[mask], y[mask])


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        lambda z, y: F.nll_loss(F.log_softmax(z, -1), y),
        lambda z, y: F.mse_loss(z.mean(-1), y.float()),
        lambda z, y: F.binary_cross_entropy_with_logits(z[:, 0], y.float()),
        lambda z, y: F.layer_norm(F.gelu(z), (6,)).square().sum() / y.numel(),
    ],
)
def test_selected_rows_on_meta_are_those_with_values(
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    batch = {"x": torch.ones(4, 8, 6), "y": torch.ones(4, 8).long(), "mask": torch.ones(4, 8).bool()}
    found = {}
    for device in ("cpu", "meta"):
        arrays = {name: array.to(device) for name, array in batch.items()}
        graph = layoutopt.from_torch(MaskedLoss(loss).to(device), arrays).graph
        found[device] = graph.dims(), [node.op for node, _ in graph.walk()]
    assert found["cpu"] == found["meta"]

"""What each module of a component computes, and in which order: counted by a dry run.

Proves: the counts are those that one works out by hand; order is the order of first use; attention counts for the
module before it; weights that are read without calling their module count for the module that owns them; every
architecture of the zoo gives an order of all its modules that run; the module is as it was.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from modelpool.pool.weights.ops.casting_classes import set_weight_functions, swap_to_casting
from modelpool.pool.weights.patcher.weight_bytes import module_weights
from modelpool.pool.weights.tracing.dry_run import META
from modelpool.pool.weights.tracing.module_flops import module_work
from tests.each_case import each_case
from tests.pool.zoo import FAMILIES, build
from tests.pool.zoo.case import quiet_libraries
from tests.pool.zoo.peaks import call_on_meta

#: family -> modules with weights that a forward pass does not use, with the reason
UNUSED = {
    "vae_flux2": ({"bn"}, "statistics that the pipeline reads"),
    "vae_ltx": ({""}, "statistics that the pipeline reads"),
    "vae_ltx091": ({""}, "statistics that the pipeline reads"),
}


class Small(nn.Module):
    """Two layers, used in the other order than they are defined, and attention between."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 5)
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(8))
        self.bare = nn.Linear(8, 8, bias=False)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BLD = self.first(x_BCHW).flatten(2).transpose(1, 2)
        z_BLD = F.scaled_dot_product_attention(y_BLD, y_BLD, y_BLD) * self.scale
        return self.last(F.linear(z_BLD, self.bare.weight))


def test_counts_are_those_by_hand_and_in_the_order_of_use() -> None:
    found = module_work(Small(), torch.float32, lambda m: m(torch.empty(2, 3, 6, 6, device=META)))
    cells = 6 * 6
    convolution = 2 * 2 * cells * 8 * 3 * 9  # two flops; batch, cells, outputs, inputs, kernel
    attention = 2 * (2 * 2 * cells * cells * 8)  # two products
    assert list(found.items()) == [
        ("first", convolution + attention),
        ("", 0),
        ("bare", 2 * 2 * cells * 8 * 8),
        ("last", 2 * 2 * cells * 8 * 5),
    ]


def test_a_module_that_is_used_twice_counts_twice_and_one_that_is_not_is_missing() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(4, 4)
            self.used = nn.Linear(4, 4)

        def forward(self, x_BD: Tensor) -> Tensor:
            return self.used(self.used(x_BD))

    found = module_work(Twice(), torch.float32, lambda m: m(torch.empty(3, 4, device=META)))
    assert found == {"used": 2 * 2 * 3 * 4 * 4}


def test_a_shared_weight_is_used_by_all_who_own_it_and_counted_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids_B: Tensor) -> Tensor:
            return self.head(self.table(ids_B))

    found = module_work(Tied(), torch.float32, lambda m: m(torch.zeros(3, dtype=torch.long, device=META)))
    assert sum(found.values()) == 2 * 3 * 4 * 10
    assert found.keys() == {"table", "head"}


def test_work_in_another_dtype_than_the_weights_counts_all_the_same() -> None:
    """Casting layers convert the weight for such an input; the product reads the conversion."""
    layer = nn.Sequential(nn.Linear(4, 6))
    found = module_work(layer, torch.bfloat16, lambda m: m(torch.empty(3, 4, dtype=torch.float32, device=META)))
    assert found == {"0": 2 * 3 * 4 * 6}


def test_casting_modules_with_weight_functions_count_as_plain_ones_and_keep_them() -> None:
    plain, casting = Small(), Small()
    swap_to_casting(casting)
    functions = (lambda weight: weight + 1,)
    set_weight_functions(casting.last, "weight", functions)

    def call(module: nn.Module) -> object:
        return module(torch.empty(1, 3, 4, 4, device=META))

    assert module_work(casting, torch.float32, call) == module_work(plain, torch.float32, call)
    assert casting.last.__dict__["_weight_functions"] == {"weight": functions}


@each_case("family", FAMILIES)
def test_every_architecture_gives_an_order_of_all_that_runs(family: str) -> None:
    case = build(family)
    with quiet_libraries():
        found = module_work(case.module, torch.float32, call_on_meta(case.inputs, torch.float32))
    names = {own.name for own in module_weights(case.module)}
    assert found.keys() <= names
    missing = names - found.keys()
    if family == "hidream":  # of the experts the first ones run
        missing = {name for name in missing if ".experts." not in name}
    if family == "omnigen2":  # without reference images, nothing reads them, nor the embeddings of their places
        missing = {name for name in missing if name and not name.startswith("ref_image_")}
    if family == "vae_qwen":  # one frame needs no way through time
        missing = {name for name in missing if not name.endswith("time_conv")}
    assert missing == UNUSED.get(family, (set(), ""))[0]
    assert sum(found.values()) > 0

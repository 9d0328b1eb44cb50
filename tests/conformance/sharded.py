"""Programs that train models sharded by FSDP2, for `test_gathered_weights`.

Each builds its model and returns what a user would want to be equal. They run in a process group of any size.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

D = 32


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(self.up(self.norm(x)))
        return x + functional.dropout(self.down(self.kept(hidden)), self.dropout, self.training)

    def kept(self, hidden: torch.Tensor) -> torch.Tensor:
        """Called with an activation. A subclass may keep it."""
        return hidden


def sharded(*blocks: nn.Module, **options: Any) -> nn.Sequential:
    """Return a model of these blocks, each a group of its own, and a head in the group of the root."""
    model = nn.Sequential(*blocks, nn.Linear(D, D))
    for block in blocks:
        fully_shard(block, **options)
    options.pop("reshard_after_forward", None)
    return fully_shard(model, **options)


def local(model: nn.Module) -> list[torch.Tensor]:
    return [one.detach().to_local() for one in model.parameters()]


def batch() -> torch.Tensor:
    return torch.randn(64, D, generator=torch.Generator().manual_seed(dist.get_rank()))


def train(
    model: nn.Module, loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None
) -> dict[str, Any]:
    optimizer, x = torch.optim.AdamW(model.parameters(), 1e-2), batch()
    losses = []
    for _ in range(3):
        loss = model(x).float().square().mean() if loss_of is None else loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    state = [getattr(one, "_local_tensor", one) for of in optimizer.state.values() for one in of.values()]
    return {"losses": losses, "weights": local(model), "state": state}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss = model(batch()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def blocks(kind: Callable[[], nn.Module] = Block, count: int = 3) -> list[nn.Module]:
    return [kind() for _ in range(count)]


# -- what a user does with FSDP -----------------------------------------------------------------------------


def train_plain() -> Any:
    return train(sharded(*blocks()))


def not_freed_after_forward() -> Any:
    return train(sharded(*blocks(), reshard_after_forward=False))


def dropout() -> Any:
    return train(sharded(*blocks(partial(Block, 0.2))))


def mixed_precision() -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return train(sharded(*blocks(), mp_policy=policy))


def other_dimension() -> Any:
    def place(weight: torch.Tensor) -> Any:
        return Shard(weight.dim() - 1)

    return train(sharded(*blocks(), shard_placement_fn=place))


def prefetched() -> Any:
    model = sharded(*blocks())
    for first, second in pairwise(model[:3]):
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])
    return train(model)


def accumulated_without_reduction() -> Any:
    def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
        model.set_requires_gradient_sync(False)
        model(x + 1).square().mean().backward()
        model.set_requires_gradient_sync(True)
        return model(x).square().mean()

    return train(sharded(*blocks()), loss_of)


def two_graphs_at_once() -> Any:
    return train(sharded(*blocks()), lambda model, x: (model(x) + model(2 * x)).square().mean())


def evaluated_and_clipped() -> Any:
    seen = []

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            seen.append(model(x).sum())
        loss = model(x).square().mean()
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        return loss

    found = train(sharded(*blocks()), loss_of)
    return found, [getattr(one, "_local_tensor", one) for one in seen]


def checkpointed() -> Any:
    class Checkpointed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    return train(sharded(*blocks(Checkpointed)))


def tied_in_the_root() -> Any:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inward, self.blocks, self.outward = nn.Linear(D, D), nn.ModuleList(blocks()), nn.Linear(D, D)
            self.outward.weight = self.inward.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.inward(x))
            for block in self.blocks:
                x = block(x)
            return self.outward(x)

    model = Tied()
    for block in model.blocks:
        fully_shard(block)
    return train(fully_shard(model))


def nested_groups() -> Any:
    class Nested(Block):
        def __init__(self) -> None:
            super().__init__()
            self.inner = fully_shard(nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + torch.sin(self.inner(torch.cos(x))) * 2)

    return train(sharded(*blocks(Nested)))


def not_gathered_in_backward() -> Any:
    class Looked(nn.Module):  # its backward pass needs no weights, but the result of `tanh`
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(16, D)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.table((x.sum(1) > 0).long())) * 1.5

    model = sharded(Looked(), *blocks(count=2))
    model[0].set_unshard_in_backward(False)
    return train(model, lambda model, x: model(x).square().mean())


def by_hand() -> Any:
    def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
        model[0].unshard()
        found = [torch.sin(model[0].up.weight).sum(), torch.tanh(model[0].up.weight)]
        model[0].reshard()
        return model(x).square().mean() + 0 * found[0] + 0 * found[1].detach().sum()

    return train(sharded(*blocks()), loss_of)


# -- what is read while the weights are away ----------------------------------------------------------------


def kept_by_its_module() -> Any:
    class Keeps(Block):
        def kept(self, hidden: torch.Tensor) -> torch.Tensor:
            self.hidden = hidden
            return hidden

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return y.square().mean() + 1e-3 * sum(one.hidden.square().mean() for one in model[:3])

    return train(sharded(*blocks(Keeps)), loss_of)


def kept_by_its_data() -> Any:
    """No operator makes what the module keeps."""
    seen: list[Any] = []

    class Keeps(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(1))

        def kept(self, hidden: torch.Tensor) -> torch.Tensor:
            seen.append((hidden * 2).data)
            self.last.data = torch.sin(hidden)
            return hidden

    def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return y.square().mean() + sum(one.mean() for one in [*seen, *(one.last for one in model[:3])])

    return train(sharded(*blocks(Keeps)), loss_of), seen


def views_and_parts_kept() -> Any:
    seen: list[Any] = []

    class Keeps(Block):
        def kept(self, hidden: torch.Tensor) -> torch.Tensor:
            seen.append({"a part": (hidden * 2).detach()[3:5], "statistics": (hidden.mean(), hidden.var(0))})
            return hidden

    return train(sharded(*blocks(Keeps))), seen


def seen_by_hooks() -> Any:
    seen: list[Any] = []
    model = sharded(*blocks())
    for block in model[:3]:
        block.up.register_forward_hook(lambda module, given, made: seen.append(made))
        block.norm.register_full_backward_hook(lambda module, given, made: seen.append((given, made)))

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        seen.append(sum(one.sum() for one in seen if isinstance(one, torch.Tensor)).detach())
        return loss

    return train(model, loss_of), [one.detach() if isinstance(one, torch.Tensor) else one for one in seen]


def gradients_retained() -> Any:
    seen: list[Any] = []

    class Keeps(Block):
        def kept(self, hidden: torch.Tensor) -> torch.Tensor:
            hidden.retain_grad()
            hidden.register_hook(lambda gradient: seen.append(gradient * 2))
            self.hidden = hidden
            return hidden

    model = sharded(*blocks(Keeps))
    found = train(model)
    return found, seen, [one.hidden.grad for one in model[:3]]


def saved_tensors_kept_in_backward() -> Any:
    seen: list[Any] = []

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen.append(ctx.saved_tensors[0])
            return gradient * 3 * seen[-1] ** 2

    class Cubes(Block):
        def kept(self, hidden: torch.Tensor) -> torch.Tensor:
            return Cube.apply(torch.sin(hidden))

    return train(sharded(*blocks(Cubes))), [one.detach() for one in seen]


def input_that_is_no_argument() -> Any:
    """Its gradient is on its way in the engine when the block's weights leave."""
    shared: list[torch.Tensor] = []

    class Reads(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.up(shared[0])[:, :D] * 0.5

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        shared[:] = [torch.sin(scale * x)]
        loss = model(x).square().mean()
        return loss

    scale = nn.Parameter(torch.ones(D))
    found = train(sharded(*blocks(Reads)), loss_of)
    return found, scale.grad


def outputs_kept_over_steps() -> Any:
    seen: list[Any] = []

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        seen.append(model(x))
        return seen[-1].square().mean()

    found = train(sharded(*blocks()), loss_of)
    return found, [one.detach().sum() for one in seen], [one.detach() for one in seen]


# -- what changes meanwhile ---------------------------------------------------------------------------------


def buffers_change() -> Any:
    class Scales(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(4 * D))
            self.batch_norm = nn.BatchNorm1d(D)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.batch_norm(super().forward(x)))

        def kept(self, hidden: torch.Tensor) -> torch.Tensor:
            return torch.sin(hidden * self.scale)

    def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        for block in model[:3]:
            block.scale.data.mul_(1.1)  # before the backward pass, while its weights are away
        return y.square().mean()

    model = sharded(*blocks(Scales))
    return train(model, loss_of), dict(model.named_buffers())


def loaded_and_saved() -> Any:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model = sharded(*blocks())
    first = train(model)
    saved = {name: one.clone() for name, one in get_model_state_dict(model).items()}
    second = train(model)
    set_model_state_dict(model, saved)
    return first, second, train(model), local(model)


def saved_and_loaded_in_parts() -> Any:
    """By `torch.distributed.checkpoint`, also in a thread of its own while training goes on."""
    from torch.distributed import checkpoint as parts
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = sharded(*blocks())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def steps() -> list[torch.Tensor]:
        return [step(model, optimizer) for _ in range(2)]

    def state() -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    losses = [steps()]
    parts.save(state(), checkpoint_id=f"{folder[0]}/first")
    of_their_own = dist.new_group()  # the thread has collectives, too
    later = parts.async_save(state(), checkpoint_id=f"{folder[0]}/second", process_group=of_their_own)
    losses.append(steps())
    later.result()
    for name in ("first", "second"):
        found = state()
        parts.load(found, checkpoint_id=f"{folder[0]}/{name}")
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        losses.append(steps())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(str(folder[0]))
    return losses, local(model)


def built_on_the_meta_device() -> Any:
    with torch.device("meta"):
        model = sharded(*blocks())
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            module.reset_parameters()
    return train(model)


def offloaded_to_the_cpu() -> Any:
    return train(sharded(*blocks(), offload_policy=CPUOffloadPolicy(pin_memory=False)))


class Rounded(torch.Tensor):
    """A weight that is gathered in fewer bits, as torchao's are."""

    @staticmethod
    def __new__(cls, whole: torch.Tensor) -> Rounded:
        return torch.Tensor._make_wrapper_subclass(cls, whole.shape, whole.stride(), dtype=whole.dtype)

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole = whole

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, lambda one: one.whole, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, func(*args, **kwargs))

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.whole.to(torch.bfloat16),), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        if out is None:
            whole = outputs[0].to(dtype)
            return whole, (whole,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(outputs[0])
        return None


def gathered_in_fewer_bits() -> Any:
    """What the weights become when they have been gathered is freed with them."""
    parts = blocks()
    for one in parts:
        for linear in (one.up, one.down):
            linear.weight = nn.Parameter(Rounded(linear.weight.detach()))
    model = sharded(*parts)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = [step(model, optimizer) for _ in range(3)]
    return losses, [getattr(one, "whole", one) for one in local(model)]


def in_another_thread() -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(train_plain).result()


def compiled_by_block() -> Any:
    """Dynamo forgets all that it has compiled first, since sessions begin and end in between."""
    torch._dynamo.reset()
    return train(sharded(*(torch.compile(block) for block in blocks(count=2))))


def by_hybrid_sharding() -> Any:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicated", "sharded"))
    return train(sharded(*blocks(), mesh=mesh))


def with_tensor_parallelism() -> Any:
    shape = (max(dist.get_world_size() // 2, 1), min(dist.get_world_size(), 2))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    parts = blocks()
    for block in parts:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return train(sharded(*parts, mesh=mesh["data"]))


def freed_to_smaller_shards() -> Any:
    return train(sharded(*blocks(), reshard_after_forward=2))


CHEAP = (
    train_plain,
    not_freed_after_forward,
    mixed_precision,
    accumulated_without_reduction,
    not_gathered_in_backward,
    kept_by_its_module,
    gradients_retained,
    input_that_is_no_argument,
    buffers_change,
)
DEAR = (
    other_dimension,
    two_graphs_at_once,
    checkpointed,
    tied_in_the_root,
    nested_groups,
    by_hand,
    views_and_parts_kept,
    seen_by_hooks,
    saved_tensors_kept_in_backward,
    outputs_kept_over_steps,
    dropout,
    prefetched,
    evaluated_and_clipped,
    loaded_and_saved,
    with_tensor_parallelism,
    kept_by_its_data,
    gathered_in_fewer_bits,
    built_on_the_meta_device,
    offloaded_to_the_cpu,
    in_another_thread,
    saved_and_loaded_in_parts,
    compiled_by_block,
)
IN_FOUR = (
    train_plain,
    kept_by_its_module,
    by_hybrid_sharding,
    with_tensor_parallelism,
    freed_to_smaller_shards,
)


def main(store: str, rank: int, size: int) -> None:
    """Check the programs as one of several processes. Ends at the first that fails."""
    from programs import check_stress

    limit = timedelta(seconds=60)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=limit
    )
    torch.set_num_threads(1)
    for program in IN_FOUR if size == 4 else (*CHEAP, *DEAR):
        print(program.__name__, flush=True)
        check_stress(program)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

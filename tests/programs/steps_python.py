"""Steps in which Python itself takes part: copies, threads, NumPy, reads, tensors that are released."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import queue
import threading

import torch

from tests.programs.language import PLACES, Body, Step, World, step
from tests.programs.steps_autograd import MODULES, module_of
from tests.programs.steps_tensors import UNARY


@step(PLACES, ("item", "tolist", "repr", "bool", "equal", "format", "shape", "allclose", "size"))
def read(w: World, a: int, how: str) -> None:
    x = w.pick(a)
    flat = x.reshape(-1)
    w.seen.append(
        {
            "item": lambda: flat[:1].sum().item(),
            "tolist": lambda: x.tolist(),
            "repr": lambda: repr(x),
            "bool": lambda: bool((flat != 0).any()),
            "equal": lambda: torch.equal(x, w.pick(a + 1)),
            "format": lambda: f"{x.sum().detach()}",
            "shape": lambda: (x.shape, x.stride(), x.is_contiguous()),
            "allclose": lambda: torch.allclose(x, x.clone(), equal_nan=True),
            "size": lambda: (len(flat), x.numel(), x.dim(), x.element_size()),
        }[how]()
    )


@step(PLACES)
def drop(w: World, a: int) -> None:
    if w.tensors:
        del w.tensors[-1 - a % len(w.tensors)]


@step(range(1, 6))
def drop_many(w: World, count: int) -> None:
    del w.tensors[:-count]


@step(("leaves", "modules", "optimizers", "arrays", "garbage"))
def forget(w: World, what: str) -> None:
    if what == "garbage":
        cycle: list[object] = [w.pick(0).clone()]
        cycle.append(cycle)
        del cycle
        gc.collect(0)
    else:
        getattr(w, what).clear()


@step(PLACES)
def hold_twice(w: World, a: int) -> None:
    w.keep(w.pick(a))


@step(PLACES, ("deepcopy", "copy", "pickle", "save", "list", "module"))
def duplicate(w: World, a: int, how: str) -> None:
    x = w.pick(a)
    if torch.is_inference_mode_enabled():
        return  # for leaves made there: see `leaf`
    if how == "deepcopy":
        w.keep(copy.deepcopy(x))
    elif how == "copy":
        w.keep(copy.copy(x))
    elif how == "pickle":
        w.keep(pickle.loads(pickle.dumps(x)))
    elif how == "save":
        file = io.BytesIO()
        torch.save([x, x.detach()[:1]], file)
        file.seek(0)
        w.keep(*torch.load(file))
    elif how == "list":
        w.keep(*copy.deepcopy([x.detach(), x.detach().reshape(-1)]))
    elif w.modules:
        name = min(w.modules)
        twin = copy.deepcopy(w.modules[name])
        twin.load_state_dict(w.modules[name].state_dict())
        w.modules[name] = twin


@step(PLACES, ("change", "read", "again", "from_numpy", "array", "non_contiguous", "bytes"))
def numpy(w: World, a: int, how: str) -> None:
    x = w.real(a).detach()
    x = x.float() if x.dtype is torch.bfloat16 else x
    if how == "change":
        array = x.numpy()
        array += 1
        w.arrays.append(array)
    elif how == "read":
        w.seen.append(x.numpy().tobytes())
    elif how == "again" and w.arrays:
        w.arrays[-1][...] *= 0.5
    elif how == "from_numpy":
        w.keep(torch.from_numpy(x.numpy().copy()))
    elif how == "array":
        import numpy

        w.arrays.append(numpy.asarray(x))
        w.keep(torch.as_tensor(w.arrays[-1]))
    elif how == "non_contiguous":
        x[..., ::2].numpy().fill(0.5)
    elif how == "bytes":
        w.storages.append(x.untyped_storage())
        del w.storages[:-4]
        if len(w.storages[-1]):
            w.storages[0][0] = 7
    del w.arrays[:-4]


@step(PLACES, list(UNARY))
def thread(w: World, a: int, name: str) -> None:
    """Send a tensor to a thread, and get another one back."""
    there: queue.Queue[torch.Tensor] = queue.Queue()
    back: queue.Queue[torch.Tensor | BaseException] = queue.Queue()

    def work() -> None:
        try:
            x = there.get()
            back.put(UNARY[name](x) * 2)
        except BaseException as error:
            back.put(error)

    worker = threading.Thread(target=work)
    worker.start()
    there.put(w.real(a))
    worker.join()
    result = back.get()
    if isinstance(result, BaseException):
        raise result
    w.keep(result)


@step(Body)
def in_thread(w: World, body: tuple[Step, ...]) -> None:
    """Run any steps in another thread while this one waits."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            w.run(body)
        except BaseException as error:
            errors.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    for error in errors:
        raise error


@step(list(MODULES), ("state_dict", "load", "zero_grad", "to_vector"))
def handle_module(w: World, name: str, how: str) -> None:
    found = module_of(w, name)
    if how == "state_dict":
        w.keep(*list(found.state_dict().values())[:2])
    elif how == "load":
        found.load_state_dict({key: value * 0.5 for key, value in found.state_dict().items()})
    elif how == "zero_grad":
        found.zero_grad(set_to_none=False)
    elif not torch.is_inference_mode_enabled() and (parameters := list(found.parameters())):
        vector = torch.nn.utils.parameters_to_vector(parameters)
        torch.nn.utils.vector_to_parameters(vector * 0.75, parameters)
        w.keep(vector)
